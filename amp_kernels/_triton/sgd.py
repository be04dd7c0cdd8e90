"""sgd_ in Triton.

Work: 6 bytes (16-bit weight and gradient, no momentum) to 22 bytes (fp32 weight, momentum and gradient, shadow) an
element and some ten instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._updates.state import CAUTIOUS, NESTEROV
from ._update import Rule
from ._update_kernels import cautious_direction

FLAG_CAUTIOUS, FLAG_NESTEROV = tl.constexpr(CAUTIOUS), tl.constexpr(NESTEROV)


@triton.jit
def _derive(options, flags, step):
    # The first step that is not skipped is number 1, so a buffer that a skipped step left uninitialized is never read as history.
    lr, momentum, dampening, weight_decay = options
    return (
        lr.to(tl.float32),
        momentum.to(tl.float32),
        (1.0 - dampening).to(tl.float32),
        weight_decay.to(tl.float32),
        ((flags & FLAG_NESTEROV) != 0).to(tl.float32),
        ((flags & FLAG_CAUTIOUS) != 0).to(tl.float32),
        (step == 1.0).to(tl.float32),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    lr, momentum, take, weight_decay, nesterov, cautious, first = scalars
    g = tl.where(weight_decay != 0.0, tl.fma(weight_decay, p, g), g)
    for k in tl.static_range(len(moments)):  # one, or none
        buffer = tl.where(first != 0.0, g, tl.fma(momentum, moments[k], take * g))
        moments = (buffer,)
        g = cautious_direction(tl.where(nesterov != 0.0, tl.fma(momentum, buffer, g), buffer), g, cautious)
    return (tl.fma(-lr, g, p),) + moments


sgd_ = Rule(_derive, _apply, scalars=7).launch
