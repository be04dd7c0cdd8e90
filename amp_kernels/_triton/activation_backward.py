"""``amp_kernels::activation_backward`` in Triton: one read of the gradient and of the pre-activation, one write.

The limit is memory, 6 bytes an element in 16 bits. If both inputs are contiguous they are taken as one long row; otherwise a
program walks a tile of rows and columns by strides, so that an expanded gradient (that of a sum) is not copied. An activation of two
values reads them, and writes their gradients, in the left and the right half of the columns of one row.

The sums of columns come from the same pass, a program per share of the rows and strip of columns, if all is contiguous and there is
one value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._checks.activations import GATED
from . import _tiles
from ._activations import activate_backward, swiglu_backward
from ._tiles import tile
from .column_sums import BLOCK, block, column_sums, share_of_program, summed


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


# Columns are specialized: a multiple of 16 lets a thread load 16 bytes.
@triton.jit(do_not_specialize=["rows", "shares"])
def sums_kernel(
    grad,
    preact,
    out,
    slots,
    rows,
    columns,
    shares,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The gradients of a share of the rows, contiguous like ``grad`` and ``preact``, and their sums, as ``column_sums`` makes them."""
    share, column = share_of_program(BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(share * BLOCK_ROWS, rows, shares * BLOCK_ROWS):
        at, mask = block(first, rows, column, columns, columns, BLOCK_ROWS)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(preact + at, mask=mask, other=0.0).to(tl.float32)
        dz = activate_backward(g, z, ACTIVATION).to(out.dtype.element_ty)
        tl.store(out + at, dz, mask=mask)
        total += dz.to(tl.float32)
    tl.store(slots + share * columns + column, tl.sum(total, 0), mask=column < columns)


def activation_backward(
    grad: torch.Tensor, preact: torch.Tensor, *, activation: str, bias_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/activation_backward.py``."""
    out = torch.empty(preact.shape, dtype=preact.dtype, device=preact.device)
    if bias_grad and activation not in GATED and grad.is_contiguous() and preact.is_contiguous():
        rows, columns = out[None].flatten(0, -2).shape

        def run(grid, slots, shares):
            sums_kernel[grid](
                grad, preact, out, slots, rows, columns, shares, activation, *BLOCK, enable_fp_fusion=False
            )

        return out, summed(rows, columns, out.device, run)
    if out.numel() > 0:
        _run(out, grad, preact, activation)
    return out, column_sums(out[None].flatten(0, -2)) if bias_grad else None


def _run(out: torch.Tensor, grad: torch.Tensor, preact: torch.Tensor, activation: str) -> None:
    """Writes the contiguous, non-empty ``out``."""
    halves = 2 if activation in GATED else 1
    one_row = halves == 1 and grad.is_contiguous() and preact.is_contiguous()
    columns = out.numel() if out.ndim == 0 or one_row else grad.shape[-1]
    grad, preact, out = grad.reshape(-1, columns), preact.reshape(-1, halves * columns), out.view(-1, halves * columns)
    _tiles.launch(activation_backward_kernel, [grad, preact], out, columns, activation)
