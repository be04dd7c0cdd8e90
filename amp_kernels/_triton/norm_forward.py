"""``amp_kernels::norm_forward`` in Triton: one program a row, one read and one write of it.

The limit is memory. A row of up to 16,384 columns stays in registers, where mean and mean square are taken in two passes; a longer
one is walked in pieces, its second and third read served by the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._raw.norm_forward import op
from ._norm import CHAIN, INFINITY, SMALLER, block_of, deviation, load_row, warps_of
from ._tables import on

LIMIT = 16384


@triton.jit
def _piece(x, residual, total, row, begin, columns, BLOCK: tl.constexpr):
    """Columns of the row that is normalised; writes those of the sum."""
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    at = row + column
    v = load_row(x, at, inside)
    if residual is not None:
        v = (v + load_row(residual, at, inside)).to(residual.dtype.element_ty)
        tl.store(total + at, v, mask=inside)
        v = v.to(tl.float32)
    return v


@triton.jit
def _finish(v, y, row, column, inside, weight, bias, mean, rstd):
    n = (v - mean) * rstd
    if weight is not None:
        n = n * load_row(weight, column, inside)
    if bias is not None:
        n = n + load_row(bias, column, inside)
    tl.store(y + row + column, n.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _statistics(v, inside, count, eps, FACTOR: tl.constexpr, CENTRED: tl.constexpr):
    mean = tl.cast(0.0, tl.float32)
    if CENTRED:
        mean = tl.div_rn(tl.sum(v * FACTOR, 0), count)
    d = tl.where(inside, v * FACTOR - mean, 0.0)
    square = tl.div_rn(tl.sum(d * d, 0), count)
    return mean * (1 / FACTOR), deviation(square, eps, FACTOR), square


@triton.jit
def _statistics_of_pieces(
    source, row, columns, count, eps, FACTOR: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    mean = tl.cast(0.0, tl.float32)
    if CENTRED:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, CHAIN * BLOCK):
            chain = tl.zeros([BLOCK], tl.float32)
            for begin in range(first, tl.minimum(columns, first + CHAIN * BLOCK), BLOCK):
                column = begin + tl.arange(0, BLOCK)
                chain += load_row(source, row + column, column < columns) * FACTOR
            sums += chain
        mean = tl.div_rn(tl.sum(sums, 0), count)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, CHAIN * BLOCK):
        chain = tl.zeros([BLOCK], tl.float32)
        for begin in range(first, tl.minimum(columns, first + CHAIN * BLOCK), BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < columns
            d = tl.where(inside, load_row(source, row + column, inside) * FACTOR - mean, 0.0)
            chain += d * d
        squares += chain
    square = tl.div_rn(tl.sum(squares, 0), count)
    return mean * (1 / FACTOR), deviation(square, eps, FACTOR), square


@triton.jit
def norm_forward_kernel(
    x,
    weight,
    bias,
    residual,
    y,
    total,
    means,
    rstds,
    columns,
    eps,
    CENTRED: tl.constexpr,
    WHOLE: tl.constexpr,  # the row is one block
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = index.to(tl.int64) * columns
    count = tl.cast(columns, tl.float32)
    eps = tl.cast(eps, tl.float32)
    if WHOLE:
        column = tl.arange(0, BLOCK)
        inside = column < columns
        v = _piece(x, residual, total, row, 0, columns, BLOCK)
        mean, rstd, square = _statistics(v, inside, count, eps, 1.0, CENTRED)
        if (square != square) | (square == INFINITY):
            mean, rstd, square = _statistics(v, inside, count, eps, SMALLER, CENTRED)
        _finish(v, y, row, column, inside, weight, bias, mean, rstd)
    else:
        source = x
        if residual is not None:
            for begin in range(0, columns, BLOCK):
                _piece(x, residual, total, row, begin, columns, BLOCK)
            tl.debug_barrier()  # other threads may read what one has written
            source = total
        mean, rstd, square = _statistics_of_pieces(source, row, columns, count, eps, 1.0, CENTRED, BLOCK)
        if (square != square) | (square == INFINITY):
            mean, rstd, square = _statistics_of_pieces(source, row, columns, count, eps, SMALLER, CENTRED, BLOCK)
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < columns
            _finish(load_row(source, row + column, inside), y, row, column, inside, weight, bias, mean, rstd)
    if CENTRED:
        tl.store(means + index, mean)
    tl.store(rstds + index, rstd)


@op.bound
def norm_forward(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = (call.x, call.weight, call.bias, call.residual)
    x, weight, bias, residual = (t if t is None else t.contiguous() for t in inputs)
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=call.out_dtype, device=x.device)
    total = x.new_empty(0) if residual is None else torch.empty_like(residual)
    mean = torch.empty(rows if call.centred else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows > 0:
        block = block_of(columns, LIMIT)
        with on(x.device):
            norm_forward_kernel[(rows,)](
                x,
                weight,
                bias,
                residual,
                y,
                total,
                mean,
                rstd,
                columns,
                call.eps,
                CENTRED=call.centred,
                WHOLE=columns <= block,
                BLOCK=block,
                num_warps=warps_of(block),
                enable_fp_fusion=False,
            )
    return y, total, mean, rstd
