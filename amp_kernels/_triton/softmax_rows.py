"""``amp_kernels::softmax_rows`` and ``amp_kernels::softmax_rows_backward`` in Triton: one program a row.

The limit is memory. A row of up to 16,384 columns stays in registers; a longer one is walked in pieces, twice, and every lane
keeps the largest value of its share and the sum of exponentials relative to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._raw.softmax_rows import check_backward, check_forward
from ._norm import CHAIN, INFINITY, block_of, load_row, warps_of
from ._tables import on

LIMIT = 16384
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2_E)


@triton.jit
def _mask_offset(index, middle, inner, outer_stride, middle_stride, inner_stride):
    """Offset of a row's mask; rows are numbered through three dimensions."""
    rest = index // inner
    return rest // middle * outer_stride + rest % middle * middle_stride + (index - rest * inner) * inner_stride


@triton.jit
def _take(x, row, mask, column, columns):
    """Elements of a row; -inf past its end and where the mask is false."""
    inside = column < columns
    v = tl.load(x + row + column, mask=inside, other=-INFINITY).to(tl.float32)
    if mask is not None:
        v = tl.where(tl.load(mask + column, mask=inside, other=0) != 0, v, -INFINITY)
    return v


@triton.jit
def _base(largest):
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _store(y, row, column, columns, v, base, inverse, log_sum, LOG: tl.constexpr):
    result = v - base - log_sum if LOG else _exp(v - base) * inverse
    tl.store(y + row + column, result.to(y.dtype.element_ty), mask=column < columns)


@triton.jit
def softmax_rows_kernel(
    x,
    y,
    statistics,
    mask,
    middle,
    inner,
    outer_stride,
    middle_stride,
    inner_stride,
    rows,
    columns,
    SAFE: tl.constexpr,
    LOG: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index * columns
    if mask is not None:
        mask += _mask_offset(index, middle, inner, outer_stride, middle_stride, inner_stride)
    lanes = tl.arange(0, BLOCK)
    if WHOLE:
        v = _take(x, row, mask, lanes, columns)
        base = _base(tl.reduce(v, 0, _larger))
        total = tl.sum(_exp(v - base), 0)
    else:
        largest = tl.full([BLOCK], -INFINITY, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, columns, BLOCK):
            v = _take(x, row, mask, begin + lanes, columns)
            top = _larger(v, largest)
            sums = sums * _exp(largest - _base(top)) + _exp(v - _base(top))
            largest = top
        base = _base(tl.reduce(largest, 0, _larger))
        total = tl.sum(sums * _exp(largest - base), 0)
    nothing = 0.0 if SAFE else float("nan")
    inverse = tl.where(total == 0.0, nothing, 1.0 / total)
    log_sum = tl.where(total == 0.0, nothing, tl.log2(total) * _LN2)
    if WHOLE:
        _store(y, row, lanes, columns, v, base, inverse, log_sum, LOG)
    else:
        for begin in range(0, columns, BLOCK):
            v = _take(x, row, mask, begin + lanes, columns)
            _store(y, row, begin + lanes, columns, v, base, inverse, log_sum, LOG)
    if LOG:
        tl.store(statistics + index, base)
        tl.store(statistics + rows + index, inverse)


@triton.jit
def _finish(out, row, column, columns, mask, y, g, total, base, inverse, LOG: tl.constexpr):
    inside = column < columns
    result = g - _exp(y - base) * inverse * total if LOG else y * (g - total)
    if mask is not None:
        result = tl.where(tl.load(mask + column, mask=inside, other=0) != 0, result, 0.0)
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_rows_backward_kernel(
    grad,
    of,
    statistics,
    out,
    mask,
    middle,
    inner,
    outer_stride,
    middle_stride,
    inner_stride,
    rows,
    columns,
    LOG: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index * columns
    if mask is not None:
        mask += _mask_offset(index, middle, inner, outer_stride, middle_stride, inner_stride)
    lanes = tl.arange(0, BLOCK)
    base = tl.load(statistics + index) if LOG else 0.0
    inverse = tl.load(statistics + rows + index) if LOG else 0.0
    if WHOLE:
        y, g = load_row(of, row + lanes, lanes < columns), load_row(grad, row + lanes, lanes < columns)
        total = tl.sum(g if LOG else g * y, 0)
        _finish(out, row, lanes, columns, mask, y, g, total, base, inverse, LOG)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, CHAIN * BLOCK):
            chain = tl.zeros([BLOCK], tl.float32)
            for begin in range(first, tl.minimum(columns, first + CHAIN * BLOCK), BLOCK):
                column = begin + lanes
                g = load_row(grad, row + column, column < columns)
                chain += g if LOG else g * load_row(of, row + column, column < columns)
            sums += chain
        total = tl.sum(sums, 0)
        for begin in range(0, columns, BLOCK):
            column = begin + lanes
            y, g = load_row(of, row + column, column < columns), load_row(grad, row + column, column < columns)
            _finish(out, row, column, columns, mask, y, g, total, base, inverse, LOG)


def _launch(kernel, tensors, mask: torch.Tensor | None, rows: int, columns: int, **options) -> None:
    if rows == 0:
        return
    where = (1, 1, 0, 0, 0) if mask is None else (mask.shape[1], mask.shape[2], *mask.stride()[:3])
    bytes_of_mask = None if mask is None else mask.view(torch.uint8)
    block = block_of(columns, LIMIT)
    with on(tensors[0].device):
        kernel[(rows,)](
            *tensors,
            bytes_of_mask,
            *where,
            rows,
            columns,
            WHOLE=columns <= block,
            BLOCK=block,
            num_warps=warps_of(block),
            enable_fp_fusion=False,
            **options,
        )


def softmax_rows(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    log: bool = False,
    safe: bool = False,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/softmax_rows.py``."""
    check_forward(x, mask, out_dtype)
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    statistics = torch.empty((2, rows if log else 0), dtype=torch.float32, device=x.device)
    _launch(softmax_rows_kernel, (x, y, statistics), mask, rows, columns, SAFE=safe, LOG=log)
    return y, statistics


def softmax_rows_backward(
    grad: torch.Tensor,
    of: torch.Tensor,
    statistics: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/softmax_rows.py``."""
    check_backward(grad, of, statistics, mask)
    rows, columns = grad.shape
    out = torch.empty((rows, columns), dtype=out_dtype, device=grad.device)
    _launch(softmax_rows_backward_kernel, (grad, of, statistics, out), mask, rows, columns, LOG=statistics is not None)
    return out
