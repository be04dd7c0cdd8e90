"""adamw_ in Triton: what the kernels of ``_update.py`` need to know about AdamW and Adam. The formula is csrc/math/adamw.h.

Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and gradient)
an element and some forty instructions, two of them divisions. An average of the weights moves 8 bytes more, AMSGrad 4 or 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops._blocks import COUPLED_DECAY
from . import _update
from ._update import power, real

FLAG_COUPLED = tl.constexpr(COUPLED_DECAY)


@triton.jit
def _derive(group, lr, flags, step):
    beta1, beta2, eps, weight_decay = real(group + 3), real(group + 4), real(group + 5), real(group + 6)
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
    )


@triton.jit
def _read(row):
    return (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    m, v = moments[0], moments[1]
    decay, l2, take_m, keep_v, take_v, eps, correction, step_size = scalars
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
    return (tl.fma(-step_size, tl.div_rn(m, denominator), p),) + updated


_RULE = _update.Rule(_derive, _read, _apply)


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    masters: list[torch.Tensor],
    shadows: list[torch.Tensor],
    emas: list[torch.Tensor],
    layout: torch.Tensor,
    lrs: list[torch.Tensor],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    lr: list[float],
    beta1: list[float],
    beta2: list[float],
    eps: list[float],
    weight_decay: list[float],
    ema_decay: list[float],
    flags: list[int],
    max_norm: float,
    seed: int,
) -> None:
    """``amp_kernels::adamw_`` for tensors that Triton can reach; see ``amp_kernels/ops/adamw.py``."""
    options = list(zip(lr, beta1, beta2, eps, weight_decay, strict=True))
    state = params, grads, (exp_avgs, exp_avg_sqs, max_exp_avg_sqs), steps, masters, shadows, emas, layout
    _update.launch(_RULE, *state, lrs, grad_scale, found_inf, sum_sq, options, ema_decay, flags, max_norm, seed)
