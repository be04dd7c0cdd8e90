"""Shared by the Triton kernels of a normalisation: the part of a row that one program holds, and the row's statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from .._raw._norm import SHRINK

#: Columns of a piece of a row that is too long for registers.
PIECE = 4096

#: Pieces that a lane adds one after the other; a longer row adds such sums, so that the error does not grow with it.
CHAIN = tl.constexpr(64)

INFINITY = tl.constexpr(float("inf"))
SMALLER = tl.constexpr(SHRINK)


@triton.jit
def load_row(base, at, inside):
    """fp32 values of a row at ``at``; 0 outside of it."""
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def deviation(mean_square, eps, FACTOR: tl.constexpr):
    """1 / sqrt(mean square + eps), of a row that was multiplied by ``FACTOR`` (csrc/norm/formula.h)."""
    if FACTOR == 1.0:
        return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    return tl.div_rn(FACTOR, tl.sqrt_rn(mean_square))


def block_of(columns: int, limit: int) -> int:
    """Columns that one program takes at a time: all of a row, if it can hold them."""
    return max(32, triton.next_power_of_2(columns)) if columns <= limit else min(limit, PIECE)


def warps_of(block: int) -> int:
    """Such that a thread holds 16 columns, in at most 16 warps."""
    return max(1, min(16, block // 512))
