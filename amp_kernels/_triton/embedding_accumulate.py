"""``amp_kernels::embedding_accumulate_`` in Triton: a program a piece of the sorted entries, as csrc/embedding does it.

The limit is memory: reads grad once, reads and writes the rows that occur. A run of equal indices inside a piece is
finished there; one that crosses pieces leaves a partial sum in each, which a second kernel adds in order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ._tables import on

SMALLEST_PIECE, MOST_PIECES = 16, 1024
BLOCK = 1024  # columns of a program, at most


@triton.jit
def _counts(row, rows, padding_idx):
    return (row >= 0) & (row < rows) & (row != padding_idx)


@triton.jit
def _finish(out, total, entries, mask, BY_FREQUENCY: tl.constexpr):
    if BY_FREQUENCY:
        total = tl.div_rn(total, tl.zeros_like(total) + entries.to(tl.float32))
    before = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, (before + total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def pieces_kernel(
    out,
    grad,
    sorted,
    order,
    partial,
    rows,
    entries,
    columns,
    padding_idx,
    size,
    BY_FREQUENCY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    begin = piece * size
    end = tl.minimum(begin + size, entries)
    row = tl.load(sorted + begin)
    begun_before = tl.load(sorted + begin - 1, mask=begin > 0, other=-1) == row
    first = begin
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end):
        at = tl.load(order + i)
        reads = _counts(row, rows, padding_idx) & (at >= 0) & (at < entries)
        total += tl.load(grad + at * columns + column, mask=mask & reads, other=0.0).to(tl.float32)
        following = tl.load(sorted + i + 1, mask=i + 1 < entries, other=-1)
        if (following != row) | (i + 1 == end):
            if _counts(row, rows, padding_idx):
                if begun_before | (following == row):
                    place = partial + (2 * piece + tl.where(begun_before, 0, 1)) * columns
                    tl.store(place + column, total, mask=mask)
                else:
                    _finish(out + row * columns + column, total, i + 1 - first, mask, BY_FREQUENCY)
            total = tl.zeros((BLOCK,), tl.float32)
            begun_before = begun_before & (following == row)
            first = i + 1
        row = following


@triton.jit
def joints_kernel(
    out, sorted, partial, rows, entries, columns, padding_idx, size, BY_FREQUENCY: tl.constexpr, BLOCK: tl.constexpr
):
    """Finishes the run that begins in a piece and continues past it, if there is one."""
    piece = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    begin = piece * size
    end = begin + size
    row = tl.load(sorted + end, mask=end < entries, other=-1)
    before = tl.load(sorted + begin - 1, mask=begin > 0, other=-1)
    last = tl.load(sorted + end - 1, mask=end < entries, other=-1)
    if _counts(row, rows, padding_idx) & (last == row) & (before != row):
        first = end
        if BY_FREQUENCY:
            while tl.load(sorted + first - 1, mask=first > begin, other=-1) == row:
                first -= 1
        total = tl.load(partial + (2 * piece + 1) * columns + column, mask=mask, other=0.0)
        run_end = end
        while tl.load(sorted + run_end, mask=run_end < entries, other=-1) == row:
            total += tl.load(partial + 2 * (run_end // size) * columns + column, mask=mask, other=0.0)
            if tl.load(sorted + run_end + size - 1, mask=run_end + size - 1 < entries, other=-1) == row:
                run_end += size
            else:
                while tl.load(sorted + run_end, mask=run_end < entries, other=-1) == row:
                    run_end += 1
        _finish(out + row * columns + column, total, run_end - first, mask, BY_FREQUENCY)


@triton.jit
def in_order_kernel(out, grad, sorted, order, rows, entries, columns, padding_idx, BLOCK: tl.constexpr):
    """A program per entry: the one where a run begins adds the run, entry after entry, to what ``out`` holds."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    row = tl.load(sorted + i)
    before = tl.load(sorted + i - 1, mask=i > 0, other=-1)
    if _counts(row, rows, padding_idx) & (before != row):
        total = tl.load(out + row * columns + column, mask=mask, other=0.0)
        while tl.load(sorted + i, mask=i < entries, other=-1) == row:
            at = tl.load(order + i)
            total += tl.load(grad + at * columns + column, mask=mask, other=0.0).to(tl.float32)
            i += 1
        tl.store(out + row * columns + column, total, mask=mask)


def embedding_accumulate_(
    out: torch.Tensor,
    grad: torch.Tensor,
    sorted: torch.Tensor,
    order: torch.Tensor,
    *,
    padding_idx: int = -1,
    scale_by_frequency: bool = False,
    in_order: bool = False,
) -> None:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/embedding_accumulate.py``."""
    entries, columns = grad.shape
    if entries * columns == 0:
        return
    most = MOST_PIECES if entries <= 1 << 20 else math.isqrt(entries)  # csrc/embedding/call.h
    size = max(SMALLEST_PIECE, -(-entries // most))
    pieces = -(-entries // size)
    block = min(BLOCK, max(32, triton.next_power_of_2(columns)))
    if in_order:
        grid = entries, triton.cdiv(columns, block)
        with on(out.device):
            in_order_kernel[grid](
                out, grad, sorted, order, out.shape[0], entries, columns, padding_idx, BLOCK=block,
                num_warps=max(1, block // 256),
            )  # fmt: skip
        return
    grid = pieces, triton.cdiv(columns, block)
    partial = torch.empty((pieces, 2, columns), dtype=torch.float32, device=out.device)
    shape = out.shape[0], entries, columns, padding_idx, size
    options = {"BY_FREQUENCY": scale_by_frequency, "BLOCK": block, "num_warps": max(1, block // 256)}
    with on(out.device):
        pieces_kernel[grid](out, grad, sorted, order, partial, *shape, **options)
        if pieces > 1:
            joints_kernel[grid](out, sorted, partial, *shape, **options)
