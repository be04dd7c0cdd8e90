"""SGD over a list of parameters: unscale, clip, momentum, master, 16-bit weight, all in one pass.

With ``g`` the effective gradient::

    step += 1;  g += weight_decay * p;  buffer = g if step == 1 else momentum * buffer + (1 - dampening) * g
    p -= lr * (g + momentum * buffer if nesterov else buffer)

as :class:`torch.optim.SGD`. The first step is the first one that is not skipped: a momentum buffer that a skipped step
left unwritten is never read. Without a momentum buffer ``p -= lr * g``. Flags: 1 (maximize), 2 (nesterov), 8 (stochastic
rounding), 64 (cautious: no step where the direction, times the ``g`` that enters the buffer, is not positive).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import Sample
from .op import define_update, samples8
from .state import CAUTIOUS, MAXIMIZE, NESTEROV, STOCHASTIC, cautious_direction, decayed, fma, rounded


def _rule(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    g = decayed(g, o.weight_decay, p)
    keep = rounded(o.momentum)
    for buffer in moments:  # one, or none
        history = fma(keep, buffer, g * rounded(1 - o.dampening))
        buffer = torch.where(o.step == 1, g, history)  # the first step that is taken starts the buffer, as in torch
        direction = fma(keep, buffer, g) if o.flags & NESTEROV else buffer
        moments, g = [buffer], cautious_direction(direction, g, o.flags)
    return fma(rounded(-o.lr), g, p), *moments


def _samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    plain = {"momentum": 0.0, "optional": False}
    yield call(20, [f32])
    yield call(21, [f32, bf16, f16], **plain, scale=256.0, found=0.0, max_norm=1.0)
    yield call(22, [f32], dampening=0.1, shadow=bf16, grad_dtype=f16)
    yield call(23, [bf16, f16], master=torch.int16, flags=NESTEROV, max_norm=100.0)
    yield call(24, [bf16, f32], master=f32, flags=MAXIMIZE, lrs=True, decays=True)
    yield call(25, [f16], master=torch.int16, moment_dtype=bf16)
    yield call(26, [f32, f16], found=1.0, scale=4.0, master=f32, shadow=f16)  # skipped
    yield call(27, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(28, [bf16, f32], **plain, flags=STOCHASTIC, ema=True, found=1.0)  # skipped
    yield call(29, [f16, f32], master=torch.int16, shadow=bf16, ema=True)
    yield from samples8(call)
    yield call(330, [f32, bf16], flags=CAUTIOUS | NESTEROV)


sgd_ = define_update(
    "sgd_",
    _rule,
    moments=("momentum_buffer",),
    optional=("momentum_buffer",),
    options={"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-4},
    flags=MAXIMIZE | NESTEROV | STOCHASTIC | CAUTIOUS,
    samples=_samples,
)
