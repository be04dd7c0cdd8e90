"""check_and_norm in Triton: one read of a list of gradients of any dtypes, then a small kernel that joins partial results.

Programs walk over the whole list (``_tables.py``). A lane keeps the sum of its squares and its peak
(``csrc/gradients/grad_norm.h``), the largest magnitude and the check in one. Sums are kept in fp32 within a span and in fp64 above, and
nothing is added by atomics, so a call gives the same bits each time. For results per tensor each span leaves a partial
result in a slot of its own, else each program does.

Squares below fp32's range: a span in which some lane has a small, but not zero sum is read once more, multiplied by a
power of two, for these lanes (``csrc/gradients/grad_norm.h`` has the bounds).

The speed hangs on ``tl.multiple_of`` in ``_add_span``: without the hint, or under a mask of unknown divisibility, every
load becomes scalar. The elements before the first 16-byte boundary are peeled off, so that the hint is true for any
address.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from . import _tables
from ._tables import UNIT, find_span, run_of, unit_ends, units_of_run

TABLE_COLUMNS = tl.constexpr(5)  # units up to and including this tensor, numel, address, dtype code, place in the list
DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
BLOCK = 1024
PROGRAMS_PER_SM = 4  # of 128 threads: what the registers of the widest dtype leave room for
NOT_FINITE = tl.constexpr(0x80000000)  # in a peak
SMALL_SUM = tl.constexpr(2.0**-120)
LIFT = tl.constexpr(2.0**32)
UNLIFT = tl.constexpr(2.0**-64)


@triton.jit
def _magnitude(x):
    """The bits of |x|, ordered as the magnitudes are, infinity above all numbers and NaN above infinity."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _peak(largest):
    """A magnitude in fp32, and in the sign bit whether it is not finite; a double that fp32 does not hold is infinity without it."""
    if largest.dtype == tl.int64:
        rounded = _magnitude(largest.to(tl.float64, bitcast=True).to(tl.float32)).to(tl.uint32, bitcast=True)
        finite = largest < 0x7FF0000000000000
    else:
        rounded = largest.to(tl.uint32, bitcast=True)
        finite = largest < 0x7F800000
    return tl.where(finite, rounded, rounded | NOT_FINITE)


@triton.jit
def _add(x, factor, total, largest):
    unscaled = (x if x.dtype == tl.float64 else x.to(tl.float32)) * factor.to(total.dtype)
    return total + unscaled * unscaled, tl.maximum(largest, _magnitude(unscaled))


@triton.jit
def _add_span(address, begin, count, inv_scale, sums, peaks, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds ``count`` elements, lane by lane: their squares to ``sums``, their magnitudes to ``peaks``."""
    offsets = tl.arange(0, BLOCK)
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    wide: tl.constexpr = tl.float64 == ELEMENT
    address += begin * size
    head = tl.minimum((16 - address % 16) % 16 // size, count)
    # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
    aligned = tl.multiple_of((address + head * size).to(tl.pointer_type(ELEMENT)), 16)
    blocks = (count - head) // BLOCK
    rest = count - head - blocks * BLOCK

    small = tl.zeros((BLOCK,), tl.int1)
    factor = inv_scale
    reading = 0
    readings = 1
    while reading < readings:
        total = tl.zeros((BLOCK,), tl.float64 if wide else tl.float32)
        largest = tl.zeros((BLOCK,), tl.int64 if wide else tl.int32)
        if head > 0:
            x = tl.load(address.to(tl.pointer_type(ELEMENT)) + offsets, mask=offsets < head, other=0.0)
            total, largest = _add(x, factor, total, largest)
        for i in range(blocks):
            total, largest = _add(tl.load(aligned + i * BLOCK + offsets), factor, total, largest)
        if rest > 0:
            x = tl.load(aligned + blocks * BLOCK + offsets, mask=offsets < rest, other=0.0)
            total, largest = _add(x, factor, total, largest)
        if reading == 0:
            peaks = tl.maximum(peaks, _peak(largest))
            if wide:
                sums += total
            else:
                small = (total < SMALL_SUM) & (largest > 0)
                sums += tl.where(small, 0.0, total).to(tl.float64)
                readings += tl.max(small.to(tl.int32), 0)
        else:
            sums += tl.where(small, total, 0.0).to(tl.float64) * UNLIFT
        factor = factor * LIFT
        reading += 1
    return sums, peaks


@triton.jit
def _store(slots, slot, sums, peaks, places):
    """Leaves a partial result: the sum as fp64, and after all sums the peak."""
    tl.store(slots + slot, tl.sum(sums, 0))
    tl.store((slots + places).to(tl.pointer_type(tl.uint32)) + slot, tl.max(peaks, 0))


@triton.jit(do_not_specialize=["runs", "per_run", "longer"])
def check_and_norm_kernel(
    table,
    tensors,
    runs,
    per_run,
    longer,
    grad_scale,
    slots,
    places,
    first_slot,
    PER_TENSOR: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a partial result for each program, or with ``PER_TENSOR`` for each span. ``slots`` has ``places`` of them."""
    scale = 1.0 if grad_scale is None else tl.load(grad_scale)
    inv_scale = (1.0 / tl.cast(scale, tl.float64)).to(tl.float32)
    ends = unit_ends(table, tensors, TABLE_COLUMNS, TENSORS)
    sums = tl.zeros((BLOCK,), tl.float64)
    peaks = tl.zeros((BLOCK,), tl.uint32)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        at, stop = units_of_run(run, per_run, longer)
        while at < stop:
            row, begin, count, at = find_span(table, ends, at, stop, UNIT, TABLE_COLUMNS)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            if PER_TENSOR:
                sums = tl.zeros((BLOCK,), tl.float64)
                peaks = tl.zeros((BLOCK,), tl.uint32)
            if dtype == 0:
                sums, peaks = _add_span(address, begin, count, inv_scale, sums, peaks, tl.float16, BLOCK)
            elif dtype == 1:
                sums, peaks = _add_span(address, begin, count, inv_scale, sums, peaks, tl.bfloat16, BLOCK)
            elif dtype == 2:
                sums, peaks = _add_span(address, begin, count, inv_scale, sums, peaks, tl.float32, BLOCK)
            else:
                sums, peaks = _add_span(address, begin, count, inv_scale, sums, peaks, tl.float64, BLOCK)
            if PER_TENSOR:
                tensor = (row.to(tl.int64) - table.to(tl.int64)) // (8 * TABLE_COLUMNS)
                _store(slots, first_slot + run + tensor.to(tl.int32), sums, peaks, places)
    if not PER_TENSOR:
        _store(slots, first_slot + tl.program_id(0), sums, peaks, places)


@triton.jit(do_not_specialize=["per_run", "longer"])
def finish_kernel(
    table,
    per_run,
    longer,
    slots,
    places,
    first_slot,
    norms,
    found_infs,
    LARGEST: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Joins partial results, always in the same order: those of a tensor's spans, one program a tensor, or all."""
    begin = first_slot
    end = places
    position = tl.zeros((), tl.int64)
    if PER_TENSOR:
        tensor = tl.program_id(0)
        row = table + tensor * TABLE_COLUMNS
        first = tl.load(row - TABLE_COLUMNS, mask=tensor > 0, other=0).to(tl.int32)
        begin = first_slot + run_of(first, per_run, longer) + tensor
        end = first_slot + run_of(tl.load(row).to(tl.int32) - 1, per_run, longer) + tensor + 1
        position = tl.load(row + 4)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    peaks = tl.zeros((BLOCK,), tl.uint32)
    bits = (slots + places).to(tl.pointer_type(tl.uint32))
    for start in range(begin, end, BLOCK):
        at = start + offsets
        sums += tl.load(slots + at, mask=at < end, other=0.0)
        peaks = tl.maximum(peaks, tl.load(bits + at, mask=at < end, other=0))
    peak = tl.max(peaks, 0)
    if LARGEST:
        tl.store(norms + position, (peak & 0x7FFFFFFF).to(tl.float32, bitcast=True))
    else:
        tl.store(norms + position, tl.sum(sums, 0).to(tl.float32))
    tl.store(found_infs + position, (peak >= NOT_FINITE).to(tl.float32))


def check_and_norm(
    grads: list[torch.Tensor],
    grad_scale: torch.Tensor | None = None,
    *,
    norm_type: float = 2.0,
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``amp_kernels::check_and_norm`` for tensors that Triton can reach; see ``amp_kernels/_raw/check_and_norm.py``."""
    device = grads[0].device
    entries = [(g.numel(), g.data_ptr(), DTYPE_CODES[g.dtype], i) for i, g in enumerate(grads)]
    with _tables.on(device):
        tables = _tables.tensor_tables(entries, device, _tables.programs(device, PROGRAMS_PER_SM))
        make = torch.zeros if not tables or (per_tensor and not all(entry[0] for entry in entries)) else torch.empty
        norms, found_infs = (
            make((len(grads),) if per_tensor else (), dtype=torch.float32, device=device) for _ in range(2)
        )
        sizes = [table.runs + table.tensors if per_tensor else table.programs for table in tables]
        places = sum(sizes)
        slots = torch.empty(places + triton.cdiv(places, 2), dtype=torch.float64, device=device)
        for i, table in enumerate(tables):
            check_and_norm_kernel[(table.programs,)](
                table.rows,
                table.tensors,
                *table.shares,
                grad_scale,
                slots,
                places,
                sum(sizes[:i]),
                PER_TENSOR=per_tensor,
                TENSORS=table.capacity,
                BLOCK=BLOCK,
                num_warps=4,
                maxnreg=128,
            )
        for i, table in enumerate(tables if per_tensor else tables[:1]):
            finish_kernel[(table.tensors if per_tensor else 1,)](
                table.rows,
                *table.shares[1:],
                slots,
                places,
                sum(sizes[:i]),
                norms,
                found_infs,
                LARGEST=norm_type == math.inf,
                PER_TENSOR=per_tensor,
                BLOCK=BLOCK,
                num_warps=4,
            )
    return norms, found_infs
