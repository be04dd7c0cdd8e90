"""adamw_ in Triton.

Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and gradient)
an element and some forty instructions, two of them divisions. An average of the weights moves 8 bytes more, AMSGrad 4 or 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._updates.state import CAUTIOUS, COUPLED_DECAY
from ._update import Rule
from ._update_kernels import cautious_direction, power

FLAG_COUPLED, FLAG_CAUTIOUS = tl.constexpr(COUPLED_DECAY), tl.constexpr(CAUTIOUS)


@triton.jit
def _derive(options, flags, step):
    lr, beta1, beta2, eps, weight_decay = options
    t = step.to(tl.uint32)
    correction1 = 1.0 - power(beta1, t)
    correction2 = 1.0 - power(beta2, t)
    coupled = (flags & FLAG_COUPLED) != 0
    decay = tl.where(coupled, 1.0, 1.0 - lr * weight_decay).to(tl.float32)
    l2 = tl.where(coupled, weight_decay, 0.0).to(tl.float32)
    return (
        decay,
        l2,
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        eps.to(tl.float32),
        tl.sqrt(correction2).to(tl.float32),
        (lr / correction1).to(tl.float32),
        ((flags & FLAG_CAUTIOUS) != 0).to(tl.float32),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    m, v = moments[0], moments[1]
    decay, l2, take_m, keep_v, take_v, eps, correction, step_size, cautious = scalars
    p *= decay
    g = tl.where(l2 != 0.0, tl.fma(l2, p, g), g)  # not 0 * p: an infinite weight must not reach the moments
    m = tl.fma(take_m, g - m, m)
    v = tl.fma(take_v * g, g, keep_v * v)
    updated = (m, v)
    largest = v
    for k in tl.static_range(2, len(moments)):  # AMSGrad's, or none
        largest = tl.where((moments[k] > v) | (moments[k] != moments[k]), moments[k], v)  # NaN if either is
        updated += (largest,)
    denominator = tl.div_rn(tl.sqrt_rn(largest), correction) + eps
    direction = cautious_direction(m, g, cautious)
    return (tl.fma(-step_size, tl.div_rn(direction, denominator), p),) + updated


adamw_ = Rule(_derive, _apply, scalars=9, unsigned=0b110).launch
