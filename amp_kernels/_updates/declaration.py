"""What an update op takes besides what all of them take, and what it refuses before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .state import GRADS, MAX_SEED, PARAMS

MOMENTS = (torch.float32, torch.bfloat16)
KEPT = {"masters": (torch.float32, torch.int16), "shadows": HALF_DTYPES, "emas": (torch.float32,)}
LEAST = {"dampening": -math.inf}  # of the numbers that may be negative
RATES = ("beta1", "beta2", "ema_decay")

#: Buffers by name: one per block, and what dtypes they may have.
_Buffers = dict[str, tuple[Sequence[Tensor], tuple[torch.dtype, ...]]]


@dataclass(frozen=True)
class Declaration:
    """Of an update op: its name, what it keeps of an element between steps, numbers and flags of a parameter group.

    ``moments`` stand in the order in which an op takes them, those of ``optional`` last, which a block may be without;
    ``options`` as they are packed, ``lr`` first and ``weight_decay`` last, with the values that
    samples and tests take. ``norms``: whether a step needs norms of whole tensors.
    """

    name: str
    moments: tuple[str, ...]
    options: dict[str, float]
    flags: int
    optional: tuple[str, ...] = ()
    norms: bool = False


def check(
    declared: Declaration,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    emas: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    weight_decays: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    options: Sequence[float],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    """Raise unless the arguments fit together; :class:`.op.UpdateOp` says how."""
    op = declared.name
    _check_groups(declared, options, ema_decay, flags)
    lists.check_list(op, "params", params, PARAMS)
    lists.check_list(op, "grads", grads, GRADS)
    device = params[0].device
    if len(grads) != len(params):
        raise ValueError(f"{op}: {len(params)} params and {len(grads)} grads; accepted: one grad for each param")
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if param.shape != grad.shape or param.device != grad.device or not lists.same_order(param, grad):
            raise ValueError(
                f"{op}: params[{i}] is {lists.describe(param)} and grads[{i}] {lists.describe(grad)}; "
                "shape, strides and device must be the same"
            )
    blocks = len(steps)
    if len(moments) != blocks * len(declared.moments):
        raise ValueError(
            f"{op}: moments has {len(moments)} entries and steps {blocks}; "
            f"accepted: {', '.join(declared.moments)} of each block"
        )
    of_kind = {name: moments[k * blocks : (k + 1) * blocks] for k, name in enumerate(declared.moments)}
    kept = {"masters": masters, "shadows": shadows, "emas": emas}
    buffers = {name: (tensors, MOMENTS) for name, tensors in of_kind.items()}
    buffers |= {name: (tensors, KEPT[name]) for name, tensors in kept.items()}
    _check_buffers(op, device, {**buffers, "steps": (steps, (torch.float32,))}, blocks)
    _check_layout(declared, params, buffers, steps, layout, len(flags))
    for name, scalar in (("grad_scale", grad_scale), ("found_inf", found_inf), ("sum_sq", sum_sq)):
        if scalar is not None:
            lists.check_scalar(op, name, scalar, device)
    for name, scalars, dtype in (("lrs", lrs, torch.float32), ("weight_decays", weight_decays, torch.float64)):
        if scalars and len(scalars) != len(flags):
            accepted = f"none, or one per param group ({len(flags)})"
            raise ValueError(f"{op}: {name} has {len(scalars)} entries; accepted: {accepted}")
        for i, scalar in enumerate(scalars):
            lists.check_scalar(op, f"{name}[{i}]", scalar, device, dtype)
    if sum_sq is not None:
        lists.check_number(op, "max_norm", max_norm, 0.0)
    lists.check_number(op, "seed", seed, 0, MAX_SEED)


def _check_groups(
    declared: Declaration, options: Sequence[float], ema_decay: Sequence[float], flags: Sequence[int]
) -> None:
    op, groups, names = declared.name, len(flags), list(declared.options)
    for name, values, of_group in (("options", options, names), ("ema_decay", ema_decay, ["ema_decay"])):
        if len(values) != groups * len(of_group):
            raise ValueError(
                f"{op}: {name} has {len(values)} entries and flags {groups}; "
                f"accepted: {', '.join(of_group)} of each param group"
            )
    named = [(f"{names[i % len(names)]}[{i // len(names)}]", value) for i, value in enumerate(options)]
    for name, value in [*named, *((f"ema_decay[{i}]", value) for i, value in enumerate(ema_decay))]:
        kind = name.partition("[")[0]
        if kind not in RATES:
            lists.check_number(op, name, value, LEAST.get(kind, 0.0))
        elif not 0.0 <= value < 1.0:
            raise ValueError(f"{op}: {name} is {value}; accepted: a number from 0 to below 1")
    for i, flag in enumerate(flags):
        if flag & ~declared.flags:
            bits = ", ".join(str(1 << k) for k in range(declared.flags.bit_length()) if declared.flags >> k & 1)
            raise ValueError(f"{op}: flags[{i}] is {flag}; accepted: a sum of bits out of {bits}")


def _check_buffers(op: str, device: torch.device, buffers: _Buffers, blocks: int) -> None:
    for name, (tensors, dtypes) in buffers.items():
        if len(tensors) != blocks:
            raise ValueError(f"{op}: {name} has {len(tensors)} entries and steps {blocks}; accepted: one per block")
        for b, buffer in enumerate(tensors):
            if buffer.dtype not in dtypes:
                raise TypeError(f"{op}: {name}[{b}] is {buffer.dtype}; accepted: {lists.names(dtypes)}")
            if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != device:
                raise ValueError(
                    f"{op}: {name}[{b}] is {lists.describe(buffer)}; accepted: a flat, contiguous buffer on {device}"
                )


def _check_layout(
    declared: Declaration,
    params: Sequence[Tensor],
    buffers: _Buffers,
    steps: Sequence[Tensor],
    layout: Tensor,
    groups: int,
) -> None:
    op, may_be_absent = declared.name, (*KEPT, *declared.optional)
    if layout.dtype != torch.int64 or layout.device.type != "cpu" or tuple(layout.shape) != (len(params), 5):
        raise ValueError(f"{op}: layout is {lists.describe(layout)}; accepted: int64[{len(params)}, 5] on the CPU")
    for i, (block, offset, slot, group, index) in enumerate(layout.tolist()):
        row = f"{op}: layout[{i}] is {(block, offset, slot, group, index)}"
        if not 0 <= block < len(steps):
            raise ValueError(f"{row}; there are {len(steps)} blocks")
        if not 0 <= slot < steps[block].numel():
            raise ValueError(f"{row}; steps[{block}] has {steps[block].numel()} slots")
        if not 0 <= group < groups:
            raise ValueError(f"{row}; there are {groups} param groups")
        if not 0 <= index < 2**32:
            raise ValueError(f"{row}; an index is from 0 to {2**32 - 1}")
        end = offset + params[i].numel()
        for name, (tensors, _) in buffers.items():
            size = tensors[block].numel()
            if offset < 0 or (end > size and not (size == 0 and name in may_be_absent)):
                raise ValueError(f"{row}; {name}[{block}] has {size} elements, params[{i}] needs {offset} to {end}")
        for name, accepted in (("masters", HALF_DTYPES), ("shadows", (torch.float32,))):
            if buffers[name][0][block].numel() and params[i].dtype not in accepted:
                raise TypeError(
                    f"{op}: params[{i}] is {params[i].dtype} and block {block} has {name}; "
                    f"accepted: {lists.names(accepted)}"
                )
