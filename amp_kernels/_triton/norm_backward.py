"""``amp_kernels::norm_backward`` in Triton: a program takes a strip of rows and keeps its sums over them.

The limit is memory: one read of grad and x, one write. Rows of up to 8,192 columns stay in registers, and so do the sums over rows;
longer ones are walked in pieces, with the sums in the program's slot of a table, which the L2 cache holds. The slots are added in
order: deterministic, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._raw.norm_backward import op
from ._norm import CHAIN, block_of, load_row, warps_of
from ._tables import on, programs

LIMIT = 8192
PROGRAMS_PER_SM = 4
MOST_ROWS = 1024  # that a lane adds one after the other; more rows take more programs


@triton.jit
def _piece(grad, x, weight, row, column, inside, mean, rstd):
    """grad, the normalised x and the gradient of that, of some columns; 0 outside of the row."""
    dy = load_row(grad, row + column, inside)
    n = tl.where(inside, (load_row(x, row + column, inside) - mean) * rstd, 0.0)
    g = dy
    if weight is not None:
        g = dy * load_row(weight, column, inside)
    return dy, n, g


@triton.jit
def _finish(out, branch, grad_sum, row, begin, columns, n, g, rstd, mean_g, mean_gn, BLOCK: tl.constexpr):
    column = begin + tl.arange(0, BLOCK)
    inside = column < columns
    dx = (g - mean_g - n * mean_gn) * rstd
    if grad_sum is not None:
        dx += load_row(grad_sum, row + column, inside)
    dx = dx.to(out.dtype.element_ty)
    tl.store(out + row + column, dx, mask=inside)
    if branch is not None:
        tl.store(branch + row + column, dx.to(tl.float32).to(branch.dtype.element_ty), mask=inside)


@triton.jit
def _add(slot, column, inside, value, first):
    old = tl.load(slot + column, mask=inside & (first == 0), other=0.0)
    tl.store(slot + column, old + value, mask=inside)


@triton.jit
def norm_backward_kernel(
    grad,
    x,
    rstds,
    means,
    weight,
    grad_sum,
    out,
    branch,
    slots,  # [programs, PARAMETERS, columns]
    rows,
    columns,
    strip,  # rows of a program
    PARAMETERS: tl.constexpr,
    WHOLE: tl.constexpr,  # a row is one block
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.cast(columns, tl.float32)
    first = program * strip
    last = tl.minimum(first + strip, rows)
    slot = slots + program.to(tl.int64) * columns * PARAMETERS
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    mean = tl.cast(0.0, tl.float32)
    mean_g = tl.cast(0.0, tl.float32)
    for index in range(first, last):
        row = tl.cast(index, tl.int64) * columns
        rstd = tl.load(rstds + index)
        if means is not None:
            mean = tl.load(means + index)
        if WHOLE:
            column = tl.arange(0, BLOCK)
            inside = column < columns
            dy, n, g = _piece(grad, x, weight, row, column, inside, mean, rstd)
            of_weight += dy * n
            of_bias += dy
            mean_gn = tl.div_rn(tl.sum(g * n, 0), count)
            if means is not None:
                mean_g = tl.div_rn(tl.sum(g, 0), count)
            _finish(
                out, branch, grad_sum, row, 0, columns, n, g, rstd, mean_g, mean_gn, BLOCK,
            )  # fmt: skip
        else:
            sum_g = tl.zeros([BLOCK], tl.float32)
            sum_gn = tl.zeros([BLOCK], tl.float32)
            for chain in range(0, columns, CHAIN * BLOCK):
                chain_g = tl.zeros([BLOCK], tl.float32)
                chain_gn = tl.zeros([BLOCK], tl.float32)
                for begin in range(chain, tl.minimum(columns, chain + CHAIN * BLOCK), BLOCK):
                    column = begin + tl.arange(0, BLOCK)
                    inside = column < columns
                    dy, n, g = _piece(grad, x, weight, row, column, inside, mean, rstd)
                    chain_g += g
                    chain_gn += g * n
                    if PARAMETERS > 0:
                        _add(slot, column, inside, dy * n, index == first)
                    if PARAMETERS > 1:
                        _add(slot + columns, column, inside, dy, index == first)
                sum_g += chain_g
                sum_gn += chain_gn
            mean_gn = tl.div_rn(tl.sum(sum_gn, 0), count)
            if means is not None:
                mean_g = tl.div_rn(tl.sum(sum_g, 0), count)
            for begin in range(0, columns, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                inside = column < columns
                dy, n, g = _piece(grad, x, weight, row, column, inside, mean, rstd)
                _finish(
                    out, branch, grad_sum, row, begin, columns, n, g, rstd, mean_g, mean_gn, BLOCK,
                )  # fmt: skip
            tl.debug_barrier()  # the next row may find its slot written by other threads
    if WHOLE:
        column = tl.arange(0, BLOCK)
        if PARAMETERS > 0:
            tl.store(slot + column, of_weight, mask=column < columns)
        if PARAMETERS > 1:
            tl.store(slot + columns + column, of_bias, mask=column < columns)


@op.bound
def norm_backward(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = (call.parameters, call.branch_dtype)
    tensors = (call.grad, call.x, call.rstd, call.mean, call.weight, call.grad_sum)
    strips = max(programs(call.x.device, PROGRAMS_PER_SM), triton.cdiv(call.x.shape[0], MOST_ROWS))
    return _run(*(t if t is None else t.contiguous() for t in tensors), *options, strips)


def _run(
    grad, x, rstd, mean, weight, grad_sum, parameters: int, branch_dtype, strips: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows in at most ``strips`` strips."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    branch = None if branch_dtype is None else torch.empty_like(out, dtype=branch_dtype)
    of_branch = x.new_empty(0) if branch is None else branch
    if rows == 0:
        return out, rstd.new_zeros(parameters, columns), of_branch
    strip = triton.cdiv(rows, strips)
    strips = triton.cdiv(rows, strip)
    slots = torch.empty((strips, parameters, columns), dtype=torch.float32, device=x.device)
    block = block_of(columns, LIMIT)
    with on(x.device):
        norm_backward_kernel[(strips,)](
            grad,
            x,
            rstd,
            mean,
            weight,
            grad_sum,
            out,
            branch,
            slots,
            rows,
            columns,
            strip,
            PARAMETERS=parameters,
            WHOLE=columns <= block,
            BLOCK=block,
            num_warps=warps_of(block),
            enable_fp_fusion=False,
        )
    return out, slots.sum(0), of_branch
