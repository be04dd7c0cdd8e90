"""One LAMB step over a list of parameters: unscale, clip, moments, trust ratios, master, 16-bit weight, in two
passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._dispatch.library import Sample, define
from . import _blocks
from ._blocks import (
    ADAPT_ALL,
    MAXIMIZE,
    NO_BIAS_CORRECTION,
    STOCHASTIC,
    StepScalars,
    Weight,
    fma,
    rounded,
    sqrt,
)


def _reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    emas: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    if layout.is_meta:  # traced without data: nothing is returned, so there is nothing to compute
        return
    scalars = StepScalars.make(grad_scale, found_inf, sum_sq, max_norm)
    for param, grad, row in zip(params, grads, layout.tolist(), strict=True):
        (block, offset, slot, group, _), n = row, param.numel()
        exp_avg, exp_avg_sq = exp_avgs[block][offset : offset + n], exp_avg_sqs[block][offset : offset + n]
        rate = lrs[group].reshape(()).double() if lrs else torch.tensor(lr[group], dtype=torch.float64, device="cpu")
        decay = weight_decay[group]

        step = steps[block][slot] + 1
        weight = Weight.at(param, row, masters, shadows, emas, ema_decay, flags, seed, step)
        corrected = not flags[group] & NO_BIAS_CORRECTION
        correction1 = 1 - beta1[group] ** step.double() if corrected else torch.ones_like(step, dtype=torch.float64)
        correction2 = 1 - beta2[group] ** step.double() if corrected else torch.ones_like(step, dtype=torch.float64)

        p, m, v = weight.load(), exp_avg.float(), exp_avg_sq.float()
        g = scalars.gradient(grad, flags[group])
        m = fma(rounded(1 - beta1[group]), g - m, m).to(exp_avg.dtype)  # as it is stored, from here on
        v = fma(g * rounded(1 - beta2[group]), g, v * rounded(beta2[group])).to(exp_avg_sq.dtype)
        denom = sqrt(v.float()) / rounded(correction2.sqrt()) + rounded(eps[group])
        direction = m.float() / denom * rounded(1 / correction1)
        if decay != 0:
            direction = fma(rounded(decay), p, direction)
        if decay != 0 or flags[group] & ADAPT_ALL:
            weight_norm, length = p.double().square().sum().sqrt(), direction.double().square().sum().sqrt()
            ratio = torch.where((weight_norm == 0) | (length == 0), torch.ones_like(length), weight_norm / length)
            rate = rate.to(ratio.device) * ratio
        p = fma(rounded(-rate), direction, p)

        weight.store(scalars, p)
        scalars.store(exp_avg, m)
        scalars.store(exp_avg_sq, v)
        scalars.store(steps[block][slot], step)


def samples(device: str) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32

    def call(seed, dtypes, *, decay=0.01, **options) -> Sample:
        return _blocks.sample_call(device, seed, dtypes, 2, 0.9, 0.999, 1e-6, decay, lr=1e-3, **options)

    yield call(50, [f32])
    yield call(51, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(52, [f32], grad_dtype=f16, shadow=f16, scale=8.0, flags=NO_BIAS_CORRECTION)
    yield call(53, [f32, bf16], shadow=bf16, master=f32, grad_dtype=bf16, decay=0.0)
    yield call(54, [f16, bf16], master=torch.int16, max_norm=100.0, decay=0.0, flags=ADAPT_ALL)
    yield call(55, [bf16], master=torch.int16, state_dtype=bf16)
    yield call(56, [f32], flags=MAXIMIZE, lrs=True)
    yield call(57, [f32, bf16, f16], found=2.0, scale=4.0, master=torch.int16, shadow=f16)  # skipped
    yield call(58, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(59, [f32, bf16], master=f32, shadow=bf16, ema=True, lrs=True)


op = define(
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
    "Tensor(e!)[] masters, Tensor(f!)[] shadows, Tensor(g!)[] emas, Tensor layout, Tensor[] lrs, Tensor? grad_scale, "
    "Tensor? found_inf, Tensor? sum_sq, float[] lr, float[] beta1, float[] beta2, float[] eps, float[] weight_decay, "
    "float[] ema_decay, int[] flags, float max_norm, int seed) -> ()",
    _reference,
    samples=samples,
)


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    emas: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    """One LAMB step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    With ``g = grad / grad_scale * clip`` and ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))``, in float32 whatever
    is stored::

        step += 1;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
        u = m / (1 - beta1**step) / (sqrt(v) / sqrt(1 - beta2**step) + eps) + weight_decay * p
        p -= lr * ratio * u,  ratio = norm(p) / norm(u)

    (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020). Norms are L2,
    over one tensor, summed in float64; the ratio is 1 where one of them is 0, and for groups without weight decay. ``u``
    is computed from the moments as they are stored. State layout: see :mod:`amp_kernels.ops._blocks`.

    Args:
        params, grads, exp_avgs, exp_avg_sqs, steps, masters, shadows, emas, layout, lrs, grad_scale, found_inf, sum_sq,
            lr, beta1, beta2, eps, weight_decay, ema_decay, max_norm, seed: as in
            :func:`~amp_kernels.ops.adamw.adamw_`.
        flags: per group, sum of 1 (maximize), 8 (stochastic rounding), 16 (no bias correction) and 32 (a trust ratio
            for a group without decay, too).

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN.
    """
    _blocks.checked_call(op, locals())
