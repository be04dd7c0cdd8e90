"""Iterations that an exception ended between ``unscale_`` and ``step``: their unscaled gradients must not mix with the next loss."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as _GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .._dispatch.devices import at

Outputs = TypeVar("Outputs")  # a tensor, or a list, tuple or iterable of tensors


class AbandonedIterations(_GradScaler):
    """Mixin of :class:`amp_kernels.GradScaler`: each optimizer's record refers to its optimizer, and tracks gradients that were
    unscaled but not stepped before the next loss."""

    def _record(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's record in this iteration; drops a stale record of another optimizer at the same address."""
        records = self._per_optimizer_states
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

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or each tensor in an iterable, by the scale.

        Raises:
            ValueError: an output is neither.
        """
        if torch.compiler.is_compiling() and isinstance(outputs, Tensor):  # torch's method would cause a graph break
            if not self._enabled:
                return outputs
            if self._scale is not None and not self._per_optimizer_states:
                return outputs * at(self._scale, outputs.device)
        scaled = super().scale(outputs)
        records = self._per_optimizer_states.values() if self._enabled else ()
        unfinished = [r for r in records if r["stage"] is OptState.UNSCALED]
        if unfinished:
            for tensor in _tensors(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: _on_backward(unfinished))
        return scaled


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _on_backward(records: list[dict[str, Any]]) -> None:
    """Called when the backward of a new loss begins. Zeroed gradients were abandoned; the backward must not add to others."""
    for record in records:
        if record["stage"] is not OptState.UNSCALED or record["optimizer"]() is None:
            continue
        grads = _grads(record)
        if not grads:
            record.update(stage=OptState.READY, found_inf_per_device={}, mixed=False)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(lambda r=record, g=grads: _after_backward(r, g))


def _grads(record: dict[str, Any]) -> list[tuple[Tensor, int]]:
    params = [param for group in record["optimizer"]().param_groups for param in group["params"]]
    return [(param.grad, param.grad._version) for param in params if param.grad is not None]


def _after_backward(record: dict[str, Any], before: list[tuple[Tensor, int]]) -> None:
    now = _grads(record)
    same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
    record["mixed"] = record["stage"] is OptState.UNSCALED and not same
