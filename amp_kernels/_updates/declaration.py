"""The declaration of an update op, and the checks of its arguments before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .._raw._block8 import BLOCK
from .arguments import UpdateArguments
from .state import MAX_INDEX, MAX_SEED, elements_of

MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
KEPT = {"masters": (torch.float32, torch.int16, torch.int8), "shadows": HALF_DTYPES, "emas": (torch.float32,)}
LEAST = {"dampening": -math.inf}  # 0 for the other numbers
RATES = ("beta1", "beta2", "ema_decay")

#: Buffers by name: one per block, and their accepted dtypes.
_Buffers = dict[str, tuple[Sequence[Tensor], tuple[torch.dtype, ...]]]


@dataclass(frozen=True)
class Declaration:
    """Name, moments, options and flags of an update op.

    ``moments`` are in the order in which the op takes them, those of ``optional``, which a block may lack, last; ``options``
    are in the order in which they are packed, ``lr`` first and ``weight_decay`` last, with the values of samples and tests.
    ``unsigned`` are the moments that are never negative, whose 8-bit codes have no sign.
    """

    name: str
    moments: tuple[str, ...]
    options: dict[str, float]
    flags: int
    optional: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()


def check(declared: Declaration, a: UpdateArguments) -> None:
    """Raise unless the arguments fit together; see :class:`.op.UpdateOp`."""
    op = declared.name
    _check_groups(declared, a)
    lists.check_list(op, "params", a.params, lists.KERNEL_DTYPES)
    lists.check_list(op, "grads", a.grads, lists.KERNEL_DTYPES)
    if len(a.grads) != len(a.params):
        raise ValueError(f"{op}: {len(a.params)} params and {len(a.grads)} grads; accepted: one grad for each param")
    for i, (param, grad) in enumerate(zip(a.params, a.grads, strict=True)):
        if param.shape != grad.shape or param.device != grad.device or not lists.same_order(param, grad):
            raise ValueError(
                f"{op}: params[{i}] is {lists.describe(param)} and grads[{i}] {lists.describe(grad)}; "
                "shape, strides and device must be the same"
            )
    blocks = len(a.steps)
    if len(a.moments) != blocks * len(declared.moments):
        raise ValueError(
            f"{op}: moments has {len(a.moments)} entries and steps {blocks}; "
            f"accepted: {', '.join(declared.moments)} of each block"
        )
    of_kind = {name: a.moments[k * blocks : (k + 1) * blocks] for k, name in enumerate(declared.moments)}
    buffers = {name: (tensors, MOMENTS) for name, tensors in of_kind.items()}
    buffers |= {name: (getattr(a, name), dtypes) for name, dtypes in KEPT.items()}
    device = a.params[0].device
    _check_buffers(op, device, {**buffers, "steps": (a.steps, (torch.float32,))}, blocks)
    _check_layout(declared, a, buffers)
    _check_scalars(op, a, device)


def _check_scalars(op: str, a: UpdateArguments, device: torch.device) -> None:
    for name in ("grad_scale", "found_inf", "sum_sq"):
        scalar = getattr(a, name)
        if scalar is not None:
            lists.check_scalar(op, name, scalar, device)
    for name, dtype in (("lrs", torch.float32), ("weight_decays", torch.float64)):
        scalars = getattr(a, name)
        if scalars and len(scalars) != len(a.flags):
            accepted = f"none, or one per param group ({len(a.flags)})"
            raise ValueError(f"{op}: {name} has {len(scalars)} entries; accepted: {accepted}")
        for i, scalar in enumerate(scalars):
            lists.check_scalar(op, f"{name}[{i}]", scalar, device, dtype)
    if a.sum_sq is not None:
        lists.check_number(op, "max_norm", a.max_norm, 0.0)
    lists.check_number(op, "seed", a.seed, 0, MAX_SEED)


def _check_groups(declared: Declaration, a: UpdateArguments) -> None:
    op, groups, names = declared.name, len(a.flags), list(declared.options)
    for name, values, of_group in (("options", a.options, names), ("ema_decay", a.ema_decay, ["ema_decay"])):
        if len(values) != groups * len(of_group):
            raise ValueError(
                f"{op}: {name} has {len(values)} entries and flags {groups}; "
                f"accepted: {', '.join(of_group)} of each param group"
            )
    named = [(f"{names[i % len(names)]}[{i // len(names)}]", value) for i, value in enumerate(a.options)]
    for name, value in [*named, *((f"ema_decay[{i}]", value) for i, value in enumerate(a.ema_decay))]:
        kind = name.partition("[")[0]
        if kind not in RATES:
            lists.check_number(op, name, value, LEAST.get(kind, 0.0))
        elif not 0.0 <= value < 1.0:
            raise ValueError(f"{op}: {name} is {value}; accepted: a number from 0 to below 1")
    for i, flag in enumerate(a.flags):
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


def _check_layout(declared: Declaration, a: UpdateArguments, buffers: _Buffers) -> None:
    params, steps, layout, groups = a.params, a.steps, a.layout, len(a.flags)
    op, optional = declared.name, (*KEPT, *declared.optional)
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
        if not 0 <= index <= MAX_INDEX:
            raise ValueError(f"{row}; an index is from 0 to {MAX_INDEX}")
        end = offset + params[i].numel()
        for name, (tensors, _) in buffers.items():
            size, coded = elements_of(tensors[block]), tensors[block].dtype == torch.uint8
            if coded and (tensors[block].numel() % (BLOCK + 1) or offset % BLOCK):
                raise ValueError(
                    f"{row}; {name}[{block}] has {tensors[block].numel()} bytes; accepted for 8-bit moments: {BLOCK + 1} bytes for "
                    f"each block of {BLOCK} elements, and offsets that are multiples of {BLOCK}"
                )
            if offset < 0 or (end > size and not (size == 0 and name in optional)):
                raise ValueError(f"{row}; {name}[{block}] has {size} elements, params[{i}] needs {offset} to {end}")
        for name, accepted in (("masters", HALF_DTYPES), ("shadows", (torch.float32,))):
            if buffers[name][0][block].numel() and params[i].dtype not in accepted:
                raise TypeError(
                    f"{op}: params[{i}] is {params[i].dtype} and block {block} has {name}; "
                    f"accepted: {lists.names(accepted)}"
                )
