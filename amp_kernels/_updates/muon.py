"""The elementwise passes of Muon over a list of parameters, before and after the matrix products.

With ``g`` the effective gradient, a parameter that has a ``momentum_buffer`` ``m`` takes the first pass, in which the parameter
is the iterate of the products and only written::

    m = lerp(m, g, 1 - momentum);  p = lerp(g, m, momentum) if nesterov else m

A parameter without one takes the second, in which the gradient is the orthogonalized iterate::

    p = p * (1 - lr * weight_decay) - lr * ratio * g

as :class:`torch.optim.Muon`. With the flag 64 (cautious) the weights that ``g`` moves away from 0 do not decay (Chen et al.,
"Cautious weight decay", 2025). Other flags: 1 (maximize), 2 (nesterov), 8 (stochastic rounding). Steps are counted, but not
in the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import Sample
from .op import define_update
from .state import CAUTIOUS, MAXIMIZE, NESTEROV, STOCHASTIC, fma, rounded


def _lerp(a: Tensor, b: Tensor, keep: float, take: float) -> Tensor:
    return fma(take, b - a, a) if take < 0.5 else fma(keep, a - b, b)


def _rule(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    if moments:
        keep, take = rounded(o.momentum), rounded(1 - o.momentum)
        m = _lerp(moments[0], g, keep, take)
        return _lerp(g, m, take, keep) if o.flags & NESTEROV else m, m
    decayed = p * rounded(1 - o.lr * o.weight_decay)
    if o.flags & CAUTIOUS:
        decayed = torch.where(g * p >= 0, decayed, p)
    return (fma(rounded(-o.lr * o.ratio), g, decayed),)


def _samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    after = {"optional": False}
    yield call(40, [f32])
    yield call(41, [bf16, f16, f32], grad_dtype=f32, flags=NESTEROV | MAXIMIZE, scale=256.0, found=0.0, max_norm=1.0)
    yield call(42, [bf16], moment_dtype=bf16, momentum=0.25, lrs=True, decays=True)
    yield call(43, [bf16, f16], found=1.0, grad_dtype=f16)  # skipped
    yield call(44, [f32, bf16, f16], **after, lrs=True, decays=True)
    yield call(45, [f32], **after, shadow=bf16, grad_dtype=bf16, flags=CAUTIOUS)
    yield call(46, [bf16, f16], **after, master=torch.int16, ema=True)
    yield call(47, [bf16, f32], **after, master=f32, grad_dtype=bf16, ema=True)
    yield call(48, [bf16, f16], **after, flags=STOCHASTIC, ratio=0.5)
    yield call(49, [bf16, f32], **after, flags=CAUTIOUS, master=f32, shadow=f16, ema=True, found=1.0)  # skipped
    yield call(500, [bf16, f16, f32], moment_dtype=torch.uint8, grad_dtype=f32, flags=NESTEROV, max_norm=1.0)
    yield call(501, [bf16, f16], moment_dtype=torch.uint8, found=1.0)  # skipped
    yield call(502, [bf16, f16], **after, master=torch.int8, ema=True)


muon_ = define_update(
    "muon_",
    _rule,
    moments=("momentum_buffer",),
    optional=("momentum_buffer",),
    options={"lr": 1e-2, "momentum": 0.95, "ratio": 1.5, "weight_decay": 0.1},
    flags=MAXIMIZE | NESTEROV | STOCHASTIC | CAUTIOUS,
    samples=_samples,
)
