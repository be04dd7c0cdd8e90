"""The records that torch's gradient scaler keeps of the optimizers of an iteration: a dict for each, by the optimizer's id.

Here a record also has ``optimizer``, a weak reference, and ``mixed``. An exception may end an iteration between ``unscale_`` and
``step``: what it leaves in a record must not meet the gradients of the next iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .._dispatch.devices import largest_flag

Record = dict[str, Any]


def record_of(records: dict[int, Record], optimizer: Optimizer) -> Record:
    """The record of ``optimizer``, which is new where another optimizer had the same address.

    Raises:
        RuntimeError: the gradients are partly scaled.
    """
    owner = records[id(optimizer)].get("optimizer")
    if owner is not None and owner() is not optimizer:
        del records[id(optimizer)]
    record = records[id(optimizer)]
    record["optimizer"] = weakref.ref(optimizer)
    if record.get("mixed"):
        raise RuntimeError(
            "GradScaler: a scaled loss was added to gradients that unscale_ had divided already, so that no scale fits "
            "them. If an exception ended the iteration before its step, call optimizer.zero_grad() and scaler.update()"
        )
    return record


def clean(device: torch.device) -> dict[torch.device, Tensor]:
    """The flags of a check that found no gradients."""
    return {device: torch.zeros((), dtype=torch.float32, device=device)}


def combined(record: Record, device: torch.device) -> Tensor:
    """One flag out of those of all devices: their maximum, so that it stays 0 or 1."""
    return largest_flag((record["found_inf_per_device"] or clean(device)).values(), device)


def stepped_flags(records: dict[int, Record], device: torch.device) -> dict[int, Tensor]:
    """By the id of each optimizer that was stepped and checked: its flags, combined."""
    return {
        key: combined(record, device)
        for key, record in records.items()
        if record["stage"] is OptState.STEPPED and record["found_inf_per_device"]
    }


def watch_backward(scaled: Any, records: dict[int, Record]) -> None:
    """Have the backward of scaled losses look at the records of optimizers that were unscaled but not stepped."""
    unfinished = [record for record in records.values() if record["stage"] is OptState.UNSCALED]
    if unfinished:
        for tensor in _tensors(scaled):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _on_backward(unfinished))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _on_backward(records: list[Record]) -> None:
    """A backward of a new loss begins: forget gradients that were given up, and look whether it adds to others."""
    for record in records:
        if record["stage"] is not OptState.UNSCALED or record["optimizer"]() is None:
            continue
        grads = _grads(record)
        if not grads:
            record.update(stage=OptState.READY, found_inf_per_device={}, mixed=False)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(lambda r=record, g=grads: _after_backward(r, g))


def _grads(record: Record) -> list[tuple[Tensor, int]]:
    params = [param for group in record["optimizer"]().param_groups for param in group["params"]]
    return [(param.grad, param.grad._version) for param in params if param.grad is not None]


def _after_backward(record: Record, before: list[tuple[Tensor, int]]) -> None:
    now = _grads(record)
    same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
    record["mixed"] = record["stage"] is OptState.UNSCALED and not same
