"""muon_ in Triton.

Work: before the matrix products 10 to 16 bytes an element, after them 8 to 12, 8 more with an average of the weights, and
some ten instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._updates.state import CAUTIOUS, NESTEROV
from ._update import Rule

FLAG_CAUTIOUS, FLAG_NESTEROV = tl.constexpr(CAUTIOUS), tl.constexpr(NESTEROV)


@triton.jit
def _derive(options, flags, step):
    lr, momentum, ratio, weight_decay = options
    return (
        momentum.to(tl.float32),
        (1.0 - momentum).to(tl.float32),
        (lr * ratio).to(tl.float32),
        (1.0 - lr * weight_decay).to(tl.float32),
        ((flags & FLAG_NESTEROV) != 0).to(tl.float32),
        ((flags & FLAG_CAUTIOUS) != 0).to(tl.float32),
    )


@triton.jit
def _lerp(a, b, keep, take):
    return tl.where(take < 0.5, tl.fma(take, b - a, a), tl.fma(keep, a - b, b))


@triton.jit
def _apply(p, moments, g, scalars):
    keep, take, rate, decay, nesterov, cautious = scalars
    if len(moments) == 1:  # before the products
        m = _lerp(moments[0], g, keep, take)
        result = (tl.where(nesterov != 0.0, _lerp(g, m, take, keep), m), m)
    else:
        spared = (cautious != 0.0) & ~(g * p >= 0.0)
        result = (tl.fma(-rate, g, tl.where(spared, p, p * decay)),)
    return result


muon_ = Rule(_derive, _apply, scalars=6).launch
