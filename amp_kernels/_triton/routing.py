"""``spread_rows`` and ``combine_rows`` in Triton: a program per row of the spread matrix, or per block of columns of a token's row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._raw.routing import combine_op, spread_dtype, spread_op
from ._tables import on

BLOCK = 1024  # columns, at most


@triton.jit(do_not_specialize=["rows", "top_k"])
def spread_kernel(x, places, weights, y, out, dots, rows, top_k, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    exists = (place >= 0) & (place < rows)
    weight = 1.0 if weights is None else tl.load(weights + row)
    x += row // top_k * columns
    place *= columns
    dot = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = (column < columns) & exists
        value = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
        if y is not None:
            dot += value * tl.load(y + place + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place + column, (weight * value).to(out.dtype.element_ty), mask=mask)
    if y is not None:
        tl.store(dots + row, tl.sum(dot, 0))


@triton.jit(do_not_specialize=["rows", "top_k"])
def combine_kernel(y, places, weights, out, rows, top_k, columns, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(token * top_k, (token + 1) * top_k):
        place = tl.load(places + choice).to(tl.int64)
        exists = (place >= 0) & (place < rows)
        value = tl.load(y + place * columns + column, mask=mask & exists, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + choice, mask=exists, other=0.0)
        total += value
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)


def _options(columns: int) -> dict:
    block = min(BLOCK, max(32, triton.next_power_of_2(columns)))
    return {"BLOCK": block, "num_warps": max(1, block // 256), "enable_fp_fusion": False}


def _weights(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.contiguous()


@spread_op.bound
def spread_rows(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype, rows, columns = spread_dtype(call), call.places.numel(), call.x.shape[1]
    x, y = call.x.contiguous(), None if call.y is None else call.y.contiguous()
    out = x.new_empty(rows, columns, dtype=dtype)
    dots = None if y is None else x.new_empty(call.places.shape, dtype=torch.float32)
    if rows:
        places, weights, top_k = call.places.contiguous(), _weights(call.weights), call.places.shape[1]
        with on(x.device):
            spread_kernel[(rows,)](x, places, weights, y, out, dots, rows, top_k, columns, **_options(columns))
    return out, dots


@combine_op.bound
def combine_rows(call: Any) -> torch.Tensor:
    dtype, (tokens, top_k), columns = call.out_dtype or call.y.dtype, call.places.shape, call.y.shape[1]
    y, options = call.y.contiguous(), _options(columns)
    out = y.new_empty(tokens, columns, dtype=dtype)
    if out.numel():
        grid = tokens, triton.cdiv(columns, options["BLOCK"])
        places, weights = call.places.contiguous(), _weights(call.weights)
        with on(y.device):
            combine_kernel[grid](y, places, weights, out, tokens * top_k, top_k, columns, **options)
    return out
