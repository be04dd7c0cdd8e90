"""``column_sums`` in Triton: a program per share of the rows and strip of columns, then one per strip that adds the shares in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ._tables import on

BLOCK = (32, 128)  # rows and columns in flight in a program
PROGRAMS = 1024  # about so many; by the shape alone, so that the order of additions depends on nothing else
MOST_ROWS = 1024  # that a lane adds one after the other; more rows take more programs
_SLOTS = (64, 64)  # of the shares' sums


@triton.jit
def share_of_program(BLOCK_COLUMNS: tl.constexpr):
    """The number of this program's share, and its columns."""
    share = tl.program_id(1).to(tl.int64)
    return share, tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)


@triton.jit
def block(first, rows, column, columns, pitch, BLOCK_ROWS: tl.constexpr):
    """Offsets of the block of rows from ``first`` on, and which of its elements exist."""
    row = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_ROWS)
    return row[:, None] * pitch + column[None, :], (row < rows)[:, None] & (column < columns)[None, :]


# Columns and pitch are specialized: multiples of 16 let a thread load 16 bytes.
@triton.jit(do_not_specialize=["rows", "shares"])
def shares_kernel(x, slots, rows, columns, pitch, shares, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    share, column = share_of_program(BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(share * BLOCK_ROWS, rows, shares * BLOCK_ROWS):
        at, mask = block(first, rows, column, columns, pitch, BLOCK_ROWS)
        total += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(slots + share * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit(do_not_specialize=["rows", "columns"])
def column_sums_kernel(partials, sums, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """``sums[column]`` of the fp32 ``partials[rows, columns]``."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        acc += tl.load(partials + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(acc, axis=0), mask=column < columns)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape

    def run(grid, slots, shares):
        shares_kernel[grid](x, slots, rows, columns, x.stride(0), shares, *BLOCK)

    return summed(rows, columns, x.device, run)


def summed(rows: int, columns: int, device: torch.device, run: Callable) -> torch.Tensor:
    """The sums of columns, given ``run(grid, slots, shares)``, which leaves those of each share of the rows in ``slots``."""
    sums = torch.empty(columns, dtype=torch.float32, device=device)
    if columns == 0:
        return sums
    strips = triton.cdiv(columns, BLOCK[1])
    shares = max(1, min(PROGRAMS // strips, triton.cdiv(rows, BLOCK[0])), triton.cdiv(rows, BLOCK[0] * MOST_ROWS))
    slots = sums if shares == 1 else torch.empty(shares, columns, dtype=torch.float32, device=device)
    with on(device):
        run((strips, shares), slots, shares)
        if shares > 1:
            column_sums_kernel[(triton.cdiv(columns, _SLOTS[1]),)](slots, sums, shares, columns, *_SLOTS)
    return sums
