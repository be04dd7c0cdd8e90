"""``unit_sums_`` in Triton: a program per unit of 64 rows and block of columns, then one per block that adds the units in order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._raw.unit_sums import UNIT, op
from ._tables import on

BLOCK = 256  # columns of a program
UNIT_ROWS = tl.constexpr(UNIT)


@triton.jit(do_not_specialize=["rows", "columns"])
def unit_kernel(
    grad, x, mean, rstd, units, rows, columns, NORM: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    unit = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(unit * UNIT_ROWS, tl.minimum(rows, (unit + 1) * UNIT_ROWS)):
        value = tl.load(grad + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            n = tl.load(x + row * columns + column, mask=mask, other=0.0).to(tl.float32)
            if CENTRED:
                n -= tl.load(mean + row)
            value *= n * tl.load(rstd + row)
        total += value
    tl.store(units + unit * columns + column, total, mask=mask)


@triton.jit(do_not_specialize=["count", "columns"])
def chain_kernel(units, sums, count, columns, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    if not FRESH:
        total = tl.load(sums + column, mask=mask, other=0.0)
    at = units + column
    for _ in range(count):
        total += tl.load(at, mask=mask, other=0.0)
        at += columns
    tl.store(sums + column, total, mask=mask)


@op.bound
def unit_sums_(call: Any) -> None:
    rows, columns = call.grad.shape
    if columns == 0:
        return
    grad, x = call.grad.contiguous(), None if call.x is None else call.x.contiguous()
    count, blocks = triton.cdiv(rows, UNIT), triton.cdiv(columns, BLOCK)
    units = torch.empty(count, columns, dtype=torch.float32, device=grad.device)
    options = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
    with on(grad.device):
        if count:
            norm = {"NORM": x is not None, "CENTRED": call.mean is not None}
            unit_kernel[(count, blocks)](grad, x, call.mean, call.rstd, units, rows, columns, **norm, **options)
        chain_kernel[(blocks,)](units, call.sums, count, columns, FRESH=call.fresh, **options)
