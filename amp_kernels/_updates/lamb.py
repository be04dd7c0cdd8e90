"""LAMB over a list of parameters: unscale, clip, moments, trust ratios, master, 16-bit weight, in two passes.

With ``g`` the effective gradient::

    step += 1;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1**step) / (sqrt(v) / sqrt(1 - beta2**step) + eps) + weight_decay * p
    p -= lr * ratio * u,  ratio = norm(p) / norm(u)

(You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020). Norms are L2, over
one tensor, summed in float64; the ratio is 1 where one of them is 0, and for groups without weight decay. ``u`` is
computed from the moments as stored. Flags: 1 (maximize), 8 (stochastic rounding), 16 (no bias correction), 32
(a trust ratio for a group without decay, too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import Sample
from .op import Stage, WholeTensor, define_update, samples8
from .state import ADAPT_ALL, MAXIMIZE, NO_BIAS_CORRECTION, STOCHASTIC, decayed, fma, rounded, sqrt


def _moments(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    m, v = moments
    return fma(rounded(1 - o.beta1), g - m, m), fma(g * rounded(1 - o.beta2), g, v * rounded(o.beta2))


def _direction(p: Tensor, moments: list[Tensor], o: SimpleNamespace) -> Tensor:
    m, v = moments
    step = o.step.double()
    corrected = not o.flags & NO_BIAS_CORRECTION
    correction1, correction2 = (1 - beta**step if corrected else torch.ones_like(step) for beta in (o.beta1, o.beta2))
    denom = sqrt(v) / rounded(correction2.sqrt()) + rounded(o.eps)
    return decayed(m / denom * rounded(1 / correction1), o.weight_decay, p)


def _squares(p: Tensor, moments: list[Tensor], o: SimpleNamespace) -> Tensor:
    return torch.stack([x.double().square().sum() for x in (p, _direction(p, moments, o))])


def _rate(tensor: WholeTensor) -> Tensor:
    """The learning rate times the trust ratio."""
    o = tensor.o
    rate = torch.as_tensor(o.lr, dtype=torch.float64, device=tensor.sums.device)
    weight_norm, length = tensor.sums.sqrt().unbind()
    fixed = (weight_norm == 0) | (length == 0)
    if not o.flags & ADAPT_ALL:
        fixed |= o.weight_decay == 0
    return torch.where(fixed, rate, rate * (weight_norm / length))


def _rule(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    return (fma(rounded(-o.stage), _direction(p, moments, o), p),)


def _samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    yield call(50, [f32])
    yield call(51, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(52, [f32], grad_dtype=f16, shadow=f16, scale=8.0, flags=NO_BIAS_CORRECTION)
    yield call(53, [f32, bf16], shadow=bf16, master=f32, grad_dtype=bf16, weight_decay=0.0)
    yield call(54, [f16, bf16], master=torch.int16, max_norm=100.0, weight_decay=0.0, flags=ADAPT_ALL)
    yield call(55, [bf16], master=torch.int16, moment_dtype=bf16)
    yield call(56, [f32], flags=MAXIMIZE, lrs=True)
    yield call(57, [f32, bf16, f16], found=2.0, scale=4.0, master=torch.int16, shadow=f16)  # skipped
    yield call(58, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(59, [f32, bf16], master=f32, shadow=bf16, ema=True, lrs=True, decays=True)
    yield from samples8(call)


lamb_ = define_update(
    "lamb_",
    _rule,
    moments=("exp_avg", "exp_avg_sq"),
    unsigned=("exp_avg_sq",),
    options={"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01},
    flags=MAXIMIZE | STOCHASTIC | NO_BIAS_CORRECTION | ADAPT_ALL,
    stage=Stage(_moments, _squares, run=lambda tensors: [_rate(tensor) for tensor in tensors]),
    samples=_samples,
)
