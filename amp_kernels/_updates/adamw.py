"""AdamW (or Adam) over a list of parameters: unscale, clip, moments, master, 16-bit weight, all in one pass.

With ``g`` the effective gradient::

    step += 1;  p *= 1 - lr * weight_decay;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
    p -= lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

the order of operations of :class:`torch.optim.AdamW`'s single-tensor form (Loshchilov and Hutter, ICLR 2019); with
AMSGrad (Reddi et al., ICLR 2018) ``v_max = max(v_max, v)``, the optional moment, is under the root. Flags: 1
(maximize), 4 (coupled L2 decay: Adam instead of AdamW), 8 (stochastic rounding), 64 (cautious: ``m`` counts as 0 in the weight's
update where ``m * g <= 0``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import Sample
from .op import define_update, samples8
from .state import CAUTIOUS, COUPLED_DECAY, MAXIMIZE, STOCHASTIC, cautious_direction, decayed, fma, rounded, sqrt


def _rule(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    m, v, *largest = moments
    correction1, correction2 = (1 - beta ** o.step.double() for beta in (o.beta1, o.beta2))
    if not o.flags & COUPLED_DECAY:
        p = p * rounded(1 - o.lr * o.weight_decay)
    else:
        g = decayed(g, o.weight_decay, p)
    m = fma(rounded(1 - o.beta1), g - m, m)
    v = fma(g * rounded(1 - o.beta2), g, v * rounded(o.beta2))
    largest = [torch.maximum(v_max, v) for v_max in largest]  # one, or none
    denom = sqrt(largest[0] if largest else v) / rounded(correction2.sqrt()) + rounded(o.eps)
    direction = cautious_direction(m, g, o.flags)
    return fma(rounded(-o.lr / correction1), direction / denom, p), m, v, *largest


def _samples(amsgrad: Callable[..., Sample]) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    call = functools.partial(amsgrad, optional=False)
    yield call(10, [f32])
    yield call(11, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(12, [f32], grad_dtype=f16, shadow=f16, scale=8.0)
    yield call(13, [f32, bf16], shadow=bf16, master=f32, grad_dtype=bf16)
    yield call(14, [f16, bf16], master=torch.int16, max_norm=100.0)
    yield call(15, [bf16], master=torch.int16, moment_dtype=bf16)
    yield call(16, [f32], flags=MAXIMIZE, weight_decay=0.0, lrs=True)
    yield call(17, [f32, f16], flags=COUPLED_DECAY, master=f32, lrs=True, decays=True)
    yield call(18, [f32, bf16, f16], found=2.0, scale=4.0, master=torch.int16, shadow=f16)  # skipped
    yield amsgrad(19, [f32, f16], ema=True, master=f32)
    yield amsgrad(190, [bf16, f16, f32], moment_dtype=bf16, flags=STOCHASTIC, ema=True)
    yield call(191, [bf16, f16], flags=STOCHASTIC | MAXIMIZE, master=torch.int16, ema=True)
    yield amsgrad(192, [f32, bf16], ema=True, flags=STOCHASTIC, found=1.0)  # skipped
    yield call(193, [f32, bf16], flags=CAUTIOUS)
    yield from samples8(call, 300, flags=CAUTIOUS)
    yield from samples8(amsgrad, 310)
    yield call(320, [bf16, f16, f32], master=torch.int8, moment_dtype=torch.uint8)  # the kernel's plain form


adamw_ = define_update(
    "adamw_",
    _rule,
    moments=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    optional=("max_exp_avg_sq",),
    unsigned=("exp_avg_sq", "max_exp_avg_sq"),
    options={"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    flags=MAXIMIZE | COUPLED_DECAY | STOCHASTIC | CAUTIOUS,
    samples=_samples,
)
