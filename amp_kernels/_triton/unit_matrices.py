"""``unit_matrices`` in Triton: a program per row for the sums of squares in float64, one per matrix for its norm, and one
per row of the result. The elements are read twice and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._raw.unit_matrices import padded

BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "columns", "stride_b", "stride_m"])
def row_squares_kernel(x, sums, rows, columns, stride_b, stride_m, stride_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = x + row // rows * stride_b + row % rows * stride_m
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(begin + column.to(tl.int64) * stride_n, mask=column < columns, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + row, tl.sum(total))


@triton.jit(do_not_specialize=["rows"])
def factors_kernel(sums, factors, rows, eps, BLOCK: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(sums + matrix * rows + row, mask=row < rows, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    least = tl.load(eps)
    tl.store(factors + matrix, 1.0 / tl.where(norm < least, least, norm))


@triton.jit(do_not_specialize=["rows", "columns", "out_rows", "out_columns", "stride_b", "stride_m"])
def scale_rows_kernel(
    x, factors, out, rows, columns, out_rows, out_columns, stride_b, stride_m, stride_n, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    matrix = program // out_rows
    row = program % out_rows
    factor = tl.load(factors + matrix)
    begin = x + matrix * stride_b + row * stride_m
    for first in range(0, out_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < columns) & (row < rows)
        value = tl.load(begin + column.to(tl.int64) * stride_n, mask=inside, other=0.0).to(tl.float64) * factor
        scaled = tl.where(inside, value.to(tl.float32), 0.0).to(out.dtype.element_ty)
        tl.store(out + program * out_columns + column, scaled, mask=column < out_columns)


def unit_matrices(x: torch.Tensor, *, eps: float, dtype: torch.dtype) -> torch.Tensor:
    batch, rows, columns = x.shape
    out = x.new_empty(batch, padded(rows), padded(columns), dtype=dtype)
    if out.numel() == 0:
        return out
    sums = x.new_empty(batch * rows, dtype=torch.float64)
    factors = x.new_empty(batch, dtype=torch.float64)
    least = torch.full((), eps, dtype=torch.float64, device=x.device)  # a float argument is fp32
    with torch.cuda.device(x.device if x.is_cuda else -1):
        row_squares_kernel[(batch * rows,)](x, sums, rows, columns, *x.stride(), BLOCK=BLOCK)
        factors_kernel[(batch,)](sums, factors, rows, least, BLOCK=BLOCK)
        grid = (batch * out.shape[1],)
        scale_rows_kernel[grid](x, factors, out, rows, columns, *out.shape[1:], *x.stride(), BLOCK=BLOCK)
    return out
