"""lion_ in Triton.

Work: 14 bytes (split master, bf16 moment, 16-bit gradient) to 22 bytes (fp32 weight, moment and gradient, shadow) an
element and some ten instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._updates.state import CAUTIOUS
from ._update import Rule
from ._update_kernels import cautious_direction

FLAG_CAUTIOUS = tl.constexpr(CAUTIOUS)


@triton.jit
def _derive(options, flags, step):
    lr, beta1, beta2, weight_decay = options
    return (
        lr.to(tl.float32),
        (1.0 - lr * weight_decay).to(tl.float32),
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        ((flags & FLAG_CAUTIOUS) != 0).to(tl.float32),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    lr, decay, keep_c, take_c, keep_m, take_m, cautious = scalars
    m = moments[0]
    c = cautious_direction(tl.fma(keep_c, m, take_c * g), g, cautious)
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))  # of NaN: NaN
    return tl.fma(-lr, sign, p * decay), tl.fma(keep_m, m, take_m * g)


lion_ = Rule(_derive, _apply, scalars=7).launch
