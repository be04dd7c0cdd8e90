"""``amp_kernels::activation_backward`` in Triton: one read of the gradient and of the pre-activation, one write.

The limit is memory, 6 bytes an element in 16 bits. If both inputs are contiguous they are taken as one long row; otherwise a
program walks a tile of rows and columns by strides, so that an expanded gradient (that of a sum) is not copied. An activation of two
values reads them, and writes their gradients, in the left and the right half of the columns of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._checks.activations import GATED
from .._raw.activation_backward import check
from . import _tiles
from ._activations import activate_backward, swiglu_backward
from ._tiles import tile


@triton.jit
def _tile(grad, preact, out, preact_half, out_half, inside, ACTIVATION: tl.constexpr):
    g = tl.load(grad, mask=inside).to(tl.float32)
    z = tl.load(preact, mask=inside).to(tl.float32)
    if ACTIVATION == "swiglu":
        up = tl.load(preact + preact_half, mask=inside).to(tl.float32)
        d_gate, d_up = swiglu_backward(g, z, up)
        tl.store(out, d_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + out_half, d_up.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out, activate_backward(g, z, ACTIVATION).to(out.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(
    grad,
    preact,
    out,  # columns are contiguous
    rows,
    columns,  # of grad
    grad_row,
    grad_column,
    preact_row,
    preact_column,
    out_row,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row, column, whole = tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    grad += row * grad_row + column * grad_column
    preact += row * preact_row + column * preact_column
    out += row * out_row + column
    preact_half = preact_column * tl.cast(columns, tl.int64)
    # Inner tiles go without a mask: one of unknown divisibility would make every access scalar.
    if whole:
        _tile(grad, preact, out, preact_half, columns, None, ACTIVATION)
    else:
        _tile(grad, preact, out, preact_half, columns, (row < rows) & (column < columns), ACTIVATION)


def activation_backward(grad: torch.Tensor, preact: torch.Tensor, *, activation: str) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/activation_backward.py``."""
    check(grad, preact, activation)
    out = torch.empty(preact.shape, dtype=preact.dtype, device=preact.device)
    if out.numel() > 0:
        _run(out, grad, preact, activation)
    return out


def _run(out: torch.Tensor, grad: torch.Tensor, preact: torch.Tensor, activation: str) -> None:
    """Writes the contiguous, non-empty ``out``."""
    halves = 2 if activation in GATED else 1
    one_row = halves == 1 and grad.is_contiguous() and preact.is_contiguous()
    columns = out.numel() if out.ndim == 0 or one_row else grad.shape[-1]
    grad, preact, out = grad.reshape(-1, columns), preact.reshape(-1, halves * columns), out.view(-1, halves * columns)
    _tiles.launch(activation_backward_kernel, [grad, preact], out, columns, activation)
