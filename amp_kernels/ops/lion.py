"""One Lion step over a list of parameters: unscale, clip, moment, master, 16-bit weight, all in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._dispatch.library import Sample, define
from . import _blocks
from ._blocks import MAXIMIZE, STOCHASTIC, StepScalars, Weight, fma, rounded


def _reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
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
        block, offset, slot, group, _ = row
        exp_avg = exp_avgs[block][offset : offset + param.numel()]
        rate = lrs[group].reshape(()).double() if lrs else lr[group]
        step = steps[block][slot] + 1
        weight = Weight.at(param, row, masters, shadows, emas, ema_decay, flags, seed, step)

        p, m = weight.load(), exp_avg.float()
        g = scalars.gradient(grad, flags[group])
        direction = fma(rounded(beta1[group]), m, g * rounded(1 - beta1[group]))
        sign = torch.where(direction.isnan(), direction, direction.sign())  # torch's sign of NaN is 0
        p = fma(rounded(-rate), sign, p * rounded(1 - rate * weight_decay[group]))
        m = fma(rounded(beta2[group]), m, g * rounded(1 - beta2[group]))

        weight.store(scalars, p)
        scalars.store(exp_avg, m)
        scalars.store(steps[block][slot], step)


def samples(device: str) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32

    def call(seed, dtypes, *, decay=0.1, **options) -> Sample:
        return _blocks.sample_call(device, seed, dtypes, 1, 0.9, 0.99, decay, lr=1e-3, **options)

    yield call(30, [f32])
    yield call(31, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(32, [f32], shadow=bf16, grad_dtype=f16)
    yield call(33, [bf16, f16], master=torch.int16, max_norm=100.0)
    yield call(34, [bf16, f32], master=f32, flags=MAXIMIZE, lrs=True, decay=0.0)
    yield call(35, [bf16], master=torch.int16, state_dtype=bf16)
    yield call(36, [f32, f16], found=1.0, scale=4.0, master=f32, shadow=f16)  # skipped
    yield call(37, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(38, [bf16, f32], flags=STOCHASTIC, ema=True, found=1.0)  # skipped
    yield call(39, [bf16, f32], master=f32, shadow=bf16, ema=True)


op = define(
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, Tensor(d!)[] masters, "
    "Tensor(e!)[] shadows, Tensor(f!)[] emas, Tensor layout, Tensor[] lrs, Tensor? grad_scale, Tensor? found_inf, "
    "Tensor? sum_sq, float[] lr, float[] beta1, float[] beta2, float[] weight_decay, float[] ema_decay, int[] flags, "
    "float max_norm, int seed) -> ()",
    _reference,
    samples=samples,
)


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
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
    weight_decay: Sequence[float],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    """One Lion step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    With ``g = grad / grad_scale * clip`` and ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))``, in float32 whatever
    is stored::

        c = beta1 * m + (1 - beta1) * g;  p = p * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023; the decay is decoupled). The sign of
    NaN is NaN, so that a broken gradient does not pass for zero. State layout: see :mod:`amp_kernels.ops._blocks`.

    Args:
        params, grads, steps, masters, shadows, emas, layout, lrs, grad_scale, found_inf, sum_sq, ema_decay, max_norm,
            seed: as in :func:`~amp_kernels.ops.adamw.adamw_`; ``steps`` are counted, but do not enter the formula.
        exp_avgs: one flat float32 or bfloat16 buffer per block; updated.
        lr, beta1, beta2, weight_decay: one value per param group.
        flags: per group, sum of 1 (maximize) and 8 (stochastic rounding).

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN.
    """
    _blocks.checked_call(op, locals())
