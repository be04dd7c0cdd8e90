"""``amp_kernels::activation_forward`` in Triton: one read of the pre-activation, one write.

The limit is memory, 4 bytes an element in 16 bits. A contiguous input is taken as one long row; otherwise a program walks a tile of
rows and columns by strides. An activation of two values reads them in the left and the right half of the columns of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._checks.activations import GATED, activated_width
from . import _tiles
from ._activations import activate, swiglu
from ._tiles import tile


@triton.jit
def _tile(preact, out, preact_half, inside, ACTIVATION: tl.constexpr):
    y = tl.load(preact, mask=inside).to(tl.float32)
    if ACTIVATION == "swiglu":
        up = tl.load(preact + preact_half, mask=inside).to(tl.float32)
        y = swiglu(y, up)
    else:
        y = activate(y, ACTIVATION)
    tl.store(out, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activation_forward_kernel(
    preact,
    out,  # columns are contiguous
    rows,
    columns,  # of out
    preact_row,
    preact_column,
    out_row,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row, column, whole = tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    preact += row * preact_row + column * preact_column
    out += row * out_row + column
    preact_half = preact_column * tl.cast(columns, tl.int64)
    # Inner tiles go without a mask: one of unknown divisibility would make every access scalar.
    if whole:
        _tile(preact, out, preact_half, None, ACTIVATION)
    else:
        _tile(preact, out, preact_half, (row < rows) & (column < columns), ACTIVATION)


def activation_forward(preact: torch.Tensor, *, activation: str) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/activation_forward.py``."""
    width = preact.shape[-1:]
    shape = (*preact.shape[:-1], *(activated_width(activation, columns) for columns in width))
    out = torch.empty(shape, dtype=preact.dtype, device=preact.device)
    if out.numel() > 0:
        _run(out, preact, activation)
    return out


def _run(out: torch.Tensor, preact: torch.Tensor, activation: str) -> None:
    """Writes the contiguous, non-empty ``out``."""
    halves = 2 if activation in GATED else 1
    columns = out.numel() if out.ndim == 0 or (halves == 1 and preact.is_contiguous()) else out.shape[-1]
    preact, out = preact.reshape(-1, halves * columns), out.view(-1, columns)
    _tiles.launch(activation_forward_kernel, [preact], out, columns, activation)
