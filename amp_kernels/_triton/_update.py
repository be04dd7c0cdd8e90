"""A step of any rule in Triton, over a list of parameters: the kernels of ``_update_kernels.py`` and two functions per
optimizer, in ``<name>.py``. The formula is csrc/update/rules/<name>.h.

Parameters that store alike (dtypes, master, shadow, moments, average, rounding, alignment) are a class, and each class has a
launch of its own specialization; a model has one or two. Gradients may start at any element (views into a communication
bucket) while the state is always aligned, so no peel could align both: such parameters are a class with scalar accesses.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._raw._block8 import BLOCK as BLOCK8
from .._updates.arguments import UpdateArguments
from .._updates.state import STOCHASTIC, elements_of
from . import _tables
from ._tables import ELEMENTS
from ._update_kernels import ROW, prepare_kernel, update_kernel

PREPARE_BLOCK = 128
BLOCK = 1024
PROGRAMS_PER_SM = 4
FEW_OPERANDS = 6  # with more, four programs on an SM would need more than their 128 registers a thread

#: The parameters of a step by class: numel, row, addresses of the operands.
Classes = dict[tuple, list[tuple[int, ...]]]


@dataclass(frozen=True)
class Rule:
    """An optimizer: two jitted functions.

    ``derive(options, flags, step)`` computes float32 scalars of a parameter from the options of its group, doubles in the
    order of the declaration; ``apply(weight, moments, grad, scalars)`` is the step of an element: weight and moments.
    ``scalars``: how many ``apply`` gets. ``unsigned``: bit k if moment k is never negative, for 8-bit moments.

    ``stage(arguments, classes, tables, rows)``, for a rule that needs whole tensors, runs a first pass, which moves the
    moments, and adds its results to the scalars in the rows. ``apply`` then gets ``None`` for ``grad`` and returns the
    weight alone.
    """

    derive: Callable
    apply: Callable
    scalars: int
    unsigned: int = 0
    stage: Callable[[UpdateArguments, Classes, Tables, torch.Tensor], None] | None = None

    def launch(self, *args) -> None:
        """One step, or half of it: the ops with their :class:`UpdateArguments`."""
        arguments = UpdateArguments(*args)
        counters, classes = classes_of(arguments)
        with _tables.on(arguments.params[0].device):
            tables = Tables.of(arguments, counters)
            rows = prepare(self, tables, arguments)
            if self.stage is not None:
                self.stage(arguments, classes, tables, rows)
                if not arguments.second:
                    return
                _, classes = classes_of(arguments, with_grads=False)
            update(self, classes, rows, arguments)


@dataclass(frozen=True)
class Tables:
    """The parameters and groups as ``prepare_kernel`` reads them."""

    counters: torch.Tensor
    params: int
    groups: torch.Tensor
    group_columns: int
    lrs: bool
    weight_decays: bool

    @classmethod
    def of(cls, a: UpdateArguments, counters: tuple[tuple[int, ...], ...]) -> Tables:
        count, device = len(a.options) // len(a.flags), a.params[0].device
        groups = tuple(
            (
                *(scalars[i].data_ptr() if scalars else 0 for scalars in (a.lrs, a.weight_decays)),
                flag,
                *map(_tables.bits, (*a.options[i * count :][:count], a.ema_decay[i])),
            )
            for i, flag in enumerate(a.flags)
        )
        counted, grouped = (_tables.upload(rows, device) for rows in (counters, groups))
        return cls(counted, len(counters), grouped, len(groups[0]), bool(a.lrs), bool(a.weight_decays))


def prepare(rule: Rule, tables: Tables, a: UpdateArguments) -> torch.Tensor:
    """Counts the step of every parameter; returns their rows of scalars."""
    rows = torch.empty(tables.params * ROW.value, dtype=torch.float32, device=tables.counters.device)
    prepare_kernel[(triton.cdiv(tables.params, PREPARE_BLOCK),)](
        tables.counters,
        tables.params,
        tables.groups,
        rows,
        a.grad_scale,
        a.found_inf,
        a.sum_sq,
        a.max_norm,
        a.factors,
        DERIVE=rule.derive,
        GROUP_COLUMNS=tables.group_columns,
        LRS=tables.lrs,
        DECAYS=tables.weight_decays,
        BLOCK=PREPARE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return rows


def update(rule: Rule, classes: Classes, rows: torch.Tensor, a: UpdateArguments) -> None:
    """Updates the parameters of every class by their rows."""
    for (elements, moments, aligned, ema, stochastic), tensors in classes.items():
        programs = _tables.programs(rows.device, programs_per_sm(elements))
        for table in _tables.tensor_tables(tensors, rows.device, programs):
            update_kernel[(table.programs,)](
                table.rows,
                table.tensors,
                *table.shares,
                rows,
                a.found_inf,
                a.seed,
                ELEMENTS=elements,
                MOMENTS=moments,
                UNSIGNED=rule.unsigned,
                ALIGNED=aligned,
                EMA=ema,
                STOCHASTIC=stochastic,
                SCALAR_COUNT=rule.scalars,
                APPLY=rule.apply,
                TENSORS=table.capacity,
                BLOCK=BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )


def row_gap(width: int, pitch: int) -> tuple[int, int, int]:
    """``gap``, ``reciprocal`` and ``shift`` of random_place in csrc/base/philox.h, of rows of so many elements."""
    if width == pitch:
        return 0, 0, 0
    shift = (width // 8 - 1).bit_length() - 1
    return (pitch - width) // 8, -(-(1 << 32 + shift) // (width // 8)), shift


def programs_per_sm(elements: Sequence[tl.dtype | None]) -> int:
    return PROGRAMS_PER_SM if len(elements) <= FEW_OPERANDS else PROGRAMS_PER_SM - 1


def classes_of(a: UpdateArguments, *, with_grads: bool = True) -> tuple[tuple[tuple[int, ...], ...], Classes]:
    """The counters of ``prepare_kernel``, and the parameters of each class.

    A class is the dtypes of the operands (``None``: no gradient, no second form of the weight), the number of moments, whether
    all are aligned to 16 bytes, whether there is an average of the weights, and whether the weight is rounded stochastically.
    The exponents of moments in 8 bits are the last operands, and may be aligned to anything.
    """
    # Blocks are few and parameters many: a block's buffers are looked up once.
    buffers = [
        [
            (b.data_ptr(), b.element_size(), b.dtype, elements_of(b)) if b.numel() else None
            for b in (a.masters[block], a.shadows[block], a.emas[block], *a.moments[block :: len(a.steps)])
        ]
        for block in range(len(a.steps))
    ]
    counts = [b.data_ptr() for b in a.steps]
    counters, classes = [], {}
    for place, (param, grad, row) in enumerate(zip(a.params, a.grads, a.layout.tolist(), strict=True)):
        block, offset, slot, group, index, width, pitch = row
        counters.append((counts[block] + 4 * slot, group, index, index >> 32, *row_gap(width, pitch)))
        numel = param.numel()
        if numel == 0:
            continue
        own = param.data_ptr(), param.dtype
        master, shadow, ema, *state = (b and (b[0] + offset * b[1], b[2]) for b in buffers[block])
        if master and master[1] is torch.float32:
            main, second = master, own
        else:
            main, second = own, master or shadow
        moments = [moment for moment in state if moment]
        gradient = (grad.data_ptr(), grad.dtype) if with_grads else (0, None)
        operands = [gradient, main, second or (0, None), *moments, *([ema] if ema else [])]
        stochastic = bool(a.flags[group] & STOCHASTIC) and not master and own[1] is not torch.float32
        addresses, dtypes = zip(*operands, strict=True)
        aligned = functools.reduce(operator.or_, addresses) % 16 == 0
        exponents = tuple(b[0] + b[3] + offset // BLOCK8 for b in buffers[block][3:] if b and b[2] is torch.uint8)
        addresses, dtypes = addresses + exponents, dtypes + (torch.uint8,) * len(exponents)
        key = dtypes, len(moments), aligned, ema is not None, stochastic
        classes.setdefault(key, []).append((numel, place, *addresses))
    # Triton's dtypes last: to hash one takes a microsecond.
    return tuple(counters), {
        (tuple(dtype and ELEMENTS[dtype] for dtype in dtypes), *rest): tensors
        for (dtypes, *rest), tensors in classes.items()
    }
