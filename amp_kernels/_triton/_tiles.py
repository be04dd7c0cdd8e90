"""Tiles of a matrix for kernels of one pass: which rows and columns a program has, and how many programs there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

BLOCK = 2048  # elements a program: one load of 16 bytes a thread and 16-bit input


@triton.jit
def tile(rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Rows and columns of this program's tile, in int64, and whether all of them are there."""
    blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    first_row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS
    first_column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLUMNS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first_column + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return row, column, (first_row + BLOCK_ROWS <= rows) & (first_column + BLOCK_COLUMNS <= columns)


def shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and the number of tiles."""
    block_columns = min(BLOCK, triton.next_power_of_2(columns))
    block_rows = min(BLOCK // block_columns, triton.next_power_of_2(rows))
    return block_rows, block_columns, triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns)


def launch(kernel: Callable, inputs: Sequence[torch.Tensor], out: torch.Tensor, columns: int, activation: str) -> None:
    """Runs ``kernel(*inputs, out, rows, columns, *strides, ...)`` over tiles of ``columns`` columns. ``out`` is contiguous, not empty, and
    like the ``inputs`` a matrix with as many rows."""
    rows = out.shape[0]
    block_rows, block_columns, grid = shape(rows, columns)
    with torch.cuda.device(out.device if out.is_cuda else -1):
        kernel[(grid,)](
            *inputs,
            out,
            rows,
            columns,
            *(stride for t in inputs for stride in strides(t)),
            strides(out)[0],
            ACTIVATION=activation,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            num_warps=8,
            enable_fp_fusion=False,
        )


def strides(t: torch.Tensor) -> tuple[int, int]:
    """The strides of a matrix. A single row has stride 0: unlike its length, that is known to be aligned."""
    return (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))
