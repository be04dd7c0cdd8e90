"""lamb_ in Triton. No weight may move before the norms of all weights and directions of its tensor are known, so there are
two passes over the parameters, with the tables of ``_update.py``; the first is the rule's stage.

``moments_kernel`` reads gradient, moments and weight, writes the moments, and stores the sums of squares of each unit's
weights and directions, in double, in the unit's slot. ``rates_kernel``, one program a parameter, adds the slots of its
units, always in the same order, and writes the length of its step into its row. ``update_kernel`` then reads moments and
weight and writes the weight. It computes the direction from the moments as stored, so the first pass also rounds them
before it continues.

Work: 14 bytes (split master, bf16 moments, 16-bit gradient) to 24 bytes (fp32 throughout) an element in the first pass, 12 to
18 in the second; some forty instructions in each, two of them divisions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._updates.arguments import UpdateArguments
from .._updates.state import ADAPT_ALL, NO_BIAS_CORRECTION
from . import _tables, _update
from ._tables import UNIT, find_span, unit_ends
from ._update_kernels import (
    COUNTER,
    FIRST_OPERAND,
    ROW,
    SCALARS,
    fetch_state,
    key_of,
    learning_rate,
    pointers_of,
    power,
    read_scalars,
    store_moment,
)

FLAG_NO_CORRECTION, FLAG_ADAPT_ALL = tl.constexpr(NO_BIAS_CORRECTION), tl.constexpr(ADAPT_ALL)
UNSIGNED = tl.constexpr(0b10)  # the second moment
ADAPT, RATE = (tl.constexpr(SCALARS.value + word) for word in (7, 8))  # words of a row, after seven of both passes
PROGRAMS_PER_SM = 3  # of the first pass: sums in double need registers
SLOTS = 128  # of a tensor that are added in parallel


@triton.jit
def _derive(options, flags, step):
    _, beta1, beta2, eps, weight_decay = options
    t = step.to(tl.uint32)
    corrected = (flags & FLAG_NO_CORRECTION) == 0
    adapts = ((flags & FLAG_ADAPT_ALL) != 0) | (weight_decay != 0.0)
    return (
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        eps.to(tl.float32),
        tl.where(corrected, tl.sqrt(1.0 - power(beta2, t)), 1.0).to(tl.float32),
        tl.where(corrected, 1.0 / (1.0 - power(beta1, t)), 1.0).to(tl.float32),
        weight_decay.to(tl.float32),
        tl.where(adapts, 1.0, 0.0).to(tl.float32),
    )


@triton.jit
def _direction(p, m, v, scalars):
    eps, correction, scale_m, decay = scalars[3], scalars[4], scalars[5], scalars[6]
    adam = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction) + eps) * scale_m
    return tl.where(decay != 0.0, tl.fma(decay, p, adam), adam)  # not 0 * p: an infinite weight is not NaN


@triton.jit
def _apply(p, moments, g, scalars):
    return (tl.fma(-scalars[8], _direction(p, moments[0], moments[1], scalars), p),)


@triton.jit
def _move_elements(
    pointers, offsets, mask, first, key, inv_scale, clip, scalars, weight_sq, direction_sq, ELEMENTS: tl.constexpr
):
    """Moves the moments of one block; returns the sums with the squares of its weights and directions, lane by lane."""
    take_m, keep_v, take_v = scalars[0], scalars[1], scalars[2]
    grad = tl.load(pointers[0] + offsets, mask=mask, cache_modifier=".cg")
    state = fetch_state(pointers, offsets, mask, first, ELEMENTS, 2, UNSIGNED)
    p, m, v = state[0], state[1], state[2]
    g = grad.to(tl.float32) * inv_scale * clip
    m = tl.fma(take_m, g - m, m)
    v = tl.fma(take_v * g, g, keep_v * v)
    m = store_moment(pointers, offsets, mask, first, key, m, 0, ELEMENTS, 2, UNSIGNED)
    v = store_moment(pointers, offsets, mask, first, key, v, 1, ELEMENTS, 2, UNSIGNED)
    direction = _direction(p, m, v, scalars)
    if mask is not None:
        p, direction = tl.where(mask, p, 0.0), tl.where(mask, direction, 0.0)
    p, direction = p.to(tl.float64), direction.to(tl.float64)
    return weight_sq + p * p, direction_sq + direction * direction


@triton.jit(do_not_specialize=["seed"])
def moments_kernel(
    table,
    tensors,
    unit,
    rows,
    slots,
    found_inf,
    seed: tl.int64,
    ELEMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first pass over the parameters of a class (see ``update_kernel``). ``slots``: two doubles per unit."""
    COLUMNS: tl.constexpr = FIRST_OPERAND + len(ELEMENTS)
    ends = unit_ends(table, tensors, COLUMNS, TENSORS)
    units = tl.load(table + (tensors - 1) * COLUMNS).to(tl.int32)
    if found_inf is not None:
        units = tl.where(tl.load(found_inf) > 0.0, 0, units)
    offsets = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), units, tl.num_programs(0)):
        row, begin, count, _ = find_span(table, ends, index, index + 1, unit, COLUMNS)
        shared = rows + tl.load(row + 2) * ROW
        inv_scale, clip, scalars = tl.load(shared), tl.load(shared + 1), read_scalars(shared, 7)
        count = tl.where(clip > 1.0, 0, count)
        key = key_of(shared, seed)
        pointers = pointers_of(row, begin, ELEMENTS, 2, ALIGNED)
        weight_sq = tl.zeros((BLOCK,), tl.float64)
        direction_sq = tl.zeros((BLOCK,), tl.float64)
        whole = count // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            weight_sq, direction_sq = _move_elements(
                pointers,
                i + offsets,
                None,
                begin + i,
                key,
                inv_scale,
                clip,
                scalars,
                weight_sq,
                direction_sq,
                ELEMENTS,
            )
        if whole < count:
            at = whole + offsets
            weight_sq, direction_sq = _move_elements(
                pointers,
                at,
                at < count,
                begin + whole,
                key,
                inv_scale,
                clip,
                scalars,
                weight_sq,
                direction_sq,
                ELEMENTS,
            )
        tl.store(slots + 2 * index, tl.sum(weight_sq, 0))
        tl.store(slots + 2 * index + 1, tl.sum(direction_sq, 0))


@triton.jit
def rates_kernel(
    table,
    slots,
    rows,
    found_inf,
    counters,
    groups,
    squares,
    COLUMNS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    LRS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The length of the step of each tensor of a table, one program a tensor.

    If the parameters are pieces of tensors, the first half of a step stores their sums in ``squares``; the second, which has
    no slots, reads the whole tensors' sums from there.
    """
    tensor = tl.program_id(0)
    row = table + tensor * COLUMNS
    begin = tl.load(row - COLUMNS, mask=tensor > 0, other=0).to(tl.int32)
    end = tl.load(row).to(tl.int32)
    if found_inf is not None:  # the slots were not written
        end = tl.where(tl.load(found_inf) > 0.0, begin, end)
    place = tl.load(row + 2)
    if slots is not None:
        weight_parts = tl.zeros((SLOTS,), tl.float64)
        direction_parts = tl.zeros((SLOTS,), tl.float64)
        for first in range(begin, end, SLOTS):
            at = first + tl.arange(0, SLOTS)
            weight_parts += tl.load(slots + 2 * at, mask=at < end, other=0.0)
            direction_parts += tl.load(slots + 2 * at + 1, mask=at < end, other=0.0)
        weight_sq, direction_sq = tl.sum(weight_parts, 0), tl.sum(direction_parts, 0)
        if squares is not None:
            there = (begin < end) & ~(tl.load(rows + place * ROW + 1) > 1.0)
            tl.store(squares + 2 * place, weight_sq, mask=there)
            tl.store(squares + 2 * place + 1, direction_sq, mask=there)
            return
    else:
        weight_sq, direction_sq = tl.load(squares + 2 * place), tl.load(squares + 2 * place + 1)
    group = groups + tl.load(counters + place * COUNTER + 1) * GROUP_COLUMNS
    lr = learning_rate(group, LRS)
    shared = rows + place * ROW
    adapts = (tl.load(shared + ADAPT) != 0.0) & (weight_sq != 0.0) & (direction_sq != 0.0)  # NaN adapts, and stays
    rate = tl.where(adapts, lr * (tl.sqrt(weight_sq) / tl.sqrt(direction_sq)), lr)
    tl.store(shared + RATE, rate.to(tl.float32))


def _unit(tensors: list[tuple[int, ...]]) -> int:
    """Elements of a unit: many where there are enough units for any GPU. It depends on the list alone, so that sums are the same
    on each."""
    least, most, enough = 2 * UNIT.value, _tables.RUN_UNITS * UNIT.value, 16384
    launches = -(-len(tensors) // _tables.TENSORS_PER_TABLE)
    return min(max(sum(entry[0] for entry in tensors) // launches // enough // least * least, least), most)


def _stage(arguments: UpdateArguments, classes: _update.Classes, of_rows: _update.Tables, rows: torch.Tensor) -> None:
    """Moves the moments and writes the lengths of the steps into the rows; half of a step does one of both."""
    programs = _tables.programs(rows.device, PROGRAMS_PER_SM)
    for (elements, _, aligned, _, _), tensors in classes.items():
        unit = _unit(tensors)
        for table in _tables.tensor_tables(tensors, rows.device, programs, unit):
            slots = None
            if arguments.squares is None or not arguments.second:
                slots = _sums(table, unit, elements, aligned, rows, arguments.found_inf, arguments.seed)
            rates_kernel[(table.tensors,)](
                table.rows,
                slots,
                rows,
                arguments.found_inf,
                of_rows.counters,
                of_rows.groups,
                arguments.squares,
                COLUMNS=FIRST_OPERAND.value + len(elements),
                GROUP_COLUMNS=of_rows.group_columns,
                LRS=of_rows.lrs,
                SLOTS=SLOTS,
                num_warps=4,
                enable_fp_fusion=False,
            )


def _sums(
    table: _tables.TensorTable,
    unit: int,
    elements: tuple[tl.dtype | None, ...],
    aligned: bool,
    rows: torch.Tensor,
    found_inf: torch.Tensor | None,
    seed: int,
) -> torch.Tensor:
    """The first pass over one table; returns the sums of its units."""
    slots = torch.empty(2 * table.units, dtype=torch.float64, device=rows.device)
    moments_kernel[(table.programs,)](
        table.rows,
        table.tensors,
        unit,
        rows,
        slots,
        found_inf,
        seed,
        ELEMENTS=elements,
        ALIGNED=aligned,
        TENSORS=table.capacity,
        BLOCK=_update.BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return slots


lamb_ = _update.Rule(_derive, _apply, scalars=9, unsigned=UNSIGNED.value, stage=_stage).launch
lamb_half_ = lamb_
