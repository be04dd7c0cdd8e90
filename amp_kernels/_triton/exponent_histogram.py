"""exponent_histogram in Triton: one read of a list of tensors of any dtypes, counted by powers of two.

A program walks over its share of the list (``_tables.py``), counts the blocks of a span with ``tl.histogram``, which keeps
its counters in shared memory, and adds them to the tensor's by atomics: integers, whose order does not show. Lanes
past the end of a tensor count in a column that no tensor has.

The main loop has neither mask nor unknown alignment, as in ``check_and_norm.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._raw.exponent_histogram import BINS, INFINITY_BIN, NAN_BIN
from . import _tables
from ._tables import UNIT, find_span, unit_ends, units_of_run
from .check_and_norm import DTYPE_CODES

TABLE_COLUMNS = tl.constexpr(5)  # units up to and including this tensor, numel, address, dtype code, place in the list
COLUMNS = tl.constexpr(512)  # counters of a program: a power of two, the last one for lanes without an element
BLOCK = 1024
PROGRAMS_PER_SM = 3


@triton.jit
def _count(x, mask, counts, largest, INFINITY_BIN: tl.constexpr, NAN_BIN: tl.constexpr):
    """Adds a block of elements to ``counts``, and to ``largest`` the bits of finite magnitudes, lane by lane."""
    magnitude = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = magnitude >> 23
    # A subnormal is an integer below 2^23 in units of 2^-149, and exact as an fp32 number.
    of_subnormal = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    bins = tl.where(exponent == 0, of_subnormal, exponent + 23)
    bins = tl.where(magnitude == 0, 0, bins)
    bins = tl.where(magnitude == 0x7F800000, INFINITY_BIN, bins)
    bins = tl.where(magnitude > 0x7F800000, NAN_BIN, bins)
    largest = tl.maximum(largest, tl.where(magnitude < 0x7F800000, magnitude, 0))
    if mask is not None:
        bins = tl.where(mask, bins, COLUMNS - 1)
    return counts + tl.histogram(bins, COLUMNS), largest


@triton.jit
def _count_span(
    address, begin, count, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, INFINITY_BIN: tl.constexpr, NAN_BIN: tl.constexpr
):
    """The counters of ``count`` elements, and the bits of the largest finite magnitude."""
    offsets = tl.arange(0, BLOCK)
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    counts = tl.zeros((COLUMNS,), tl.int32)
    largest = tl.zeros((BLOCK,), tl.int32)
    address += begin * size
    head = tl.minimum((16 - address % 16) % 16 // size, count)
    # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
    aligned = tl.multiple_of((address + head * size).to(tl.pointer_type(ELEMENT)), 16)
    blocks = (count - head) // BLOCK
    rest = count - head - blocks * BLOCK
    if head > 0:
        x = tl.load(address.to(tl.pointer_type(ELEMENT)) + offsets, mask=offsets < head, other=0.0)
        counts, largest = _count(x, offsets < head, counts, largest, INFINITY_BIN, NAN_BIN)
    for i in range(blocks):
        x = tl.load(aligned + i * BLOCK + offsets)
        counts, largest = _count(x, None, counts, largest, INFINITY_BIN, NAN_BIN)
    if rest > 0:
        x = tl.load(aligned + blocks * BLOCK + offsets, mask=offsets < rest, other=0.0)
        counts, largest = _count(x, offsets < rest, counts, largest, INFINITY_BIN, NAN_BIN)
    return counts, tl.max(largest, 0)


@triton.jit(do_not_specialize=["runs", "per_run", "longer"])
def exponent_histogram_kernel(
    table,
    tensors,
    runs,
    per_run,
    longer,
    counts,
    largest,
    BINS: tl.constexpr,
    INFINITY_BIN: tl.constexpr,
    NAN_BIN: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ends = unit_ends(table, tensors, TABLE_COLUMNS, TENSORS)
    columns = tl.arange(0, COLUMNS)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        at, stop = units_of_run(run, per_run, longer)
        while at < stop:
            row, begin, count, at = find_span(table, ends, at, stop, UNIT, TABLE_COLUMNS)
            address, dtype, place = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
            if dtype == 0:
                found, most = _count_span(address, begin, count, tl.float16, BLOCK, INFINITY_BIN, NAN_BIN)
            elif dtype == 1:
                found, most = _count_span(address, begin, count, tl.bfloat16, BLOCK, INFINITY_BIN, NAN_BIN)
            elif dtype == 2:
                found, most = _count_span(address, begin, count, tl.float32, BLOCK, INFINITY_BIN, NAN_BIN)
            else:
                found, most = _count_span(address, begin, count, tl.float64, BLOCK, INFINITY_BIN, NAN_BIN)
            there = (columns < BINS) & (found > 0)
            tl.atomic_add(counts + place * BINS + columns, found.to(tl.int64), mask=there, sem="relaxed")
            tl.atomic_max(largest + place, most, sem="relaxed")


def exponent_histogram(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """``amp_kernels::exponent_histogram`` for tensors that Triton can reach; see ``amp_kernels/_raw/exponent_histogram.py``."""
    device = tensors[0].device
    counts = torch.zeros(len(tensors), BINS, dtype=torch.int64, device=device)
    largest = torch.zeros(len(tensors), dtype=torch.int32, device=device)  # bits: ordered as the magnitudes are
    entries = [(t.numel(), t.data_ptr(), DTYPE_CODES[t.dtype], i) for i, t in enumerate(tensors)]
    programs = _tables.programs(device, PROGRAMS_PER_SM)
    with _tables.on(device):
        for table in _tables.tensor_tables(entries, device, programs):
            exponent_histogram_kernel[(table.programs,)](
                table.rows,
                table.tensors,
                *table.shares,
                counts,
                largest,
                BINS=BINS,
                INFINITY_BIN=INFINITY_BIN,
                NAN_BIN=NAN_BIN,
                TENSORS=table.capacity,
                BLOCK=BLOCK,
                num_warps=4,
            )
    return counts, largest.view(torch.float32)
