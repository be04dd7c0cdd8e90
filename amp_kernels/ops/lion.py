"""One Lion step over a list of parameters: unscale, clip, moment, master, 16-bit weight, all in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._library import Sample, define
from . import _blocks, _lists
from ._blocks import HALVES, MAXIMIZE, StepScalars, fma, piece, rounded


def _reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    weight_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
) -> None:
    if layout.is_meta:  # traced without data: nothing is returned, so there is nothing to compute
        return
    scalars = StepScalars.make(grad_scale, found_inf, sum_sq, max_norm)
    for param, grad, (block, offset, slot, group) in zip(params, grads, layout.tolist(), strict=True):
        n = param.numel()
        exp_avg = exp_avgs[block][offset : offset + n]
        master, shadow = piece(masters[block], offset, n), piece(shadows[block], offset, n)
        rate = lrs[group].reshape(()).double() if lrs else lr[group]

        p, m = _blocks.load_weight(param, master), exp_avg.float()
        g = scalars.gradient(grad, flags[group])
        direction = fma(rounded(beta1[group]), m, g * rounded(1 - beta1[group]))
        sign = torch.where(direction.isnan(), direction, direction.sign())  # torch's sign of NaN is 0
        p = fma(rounded(-rate), sign, p * rounded(1 - rate * weight_decay[group]))
        m = fma(rounded(beta2[group]), m, g * rounded(1 - beta2[group]))

        _blocks.store_weight(scalars, p, param, master, shadow)
        scalars.store(exp_avg, m)
        scalars.store(steps[block][slot], steps[block][slot] + 1)


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


op = define(
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, Tensor(d!)[] masters, "
    "Tensor(e!)[] shadows, Tensor layout, Tensor[] lrs, Tensor? grad_scale, Tensor? found_inf, Tensor? sum_sq, "
    "float[] lr, float[] beta1, float[] beta2, float[] weight_decay, int[] flags, float max_norm) -> ()",
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
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    weight_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
) -> None:
    """One Lion step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    With ``g = grad / grad_scale * clip`` and ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))``, in float32 whatever
    is stored::

        c = beta1 * m + (1 - beta1) * g;  p = p * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    (Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023; the decay is decoupled). The sign of
    NaN is NaN, so that a broken gradient does not pass for zero. State layout: see :mod:`amp_kernels.ops._blocks`.

    Args:
        params, grads, steps, masters, shadows, layout, lrs, grad_scale, found_inf, sum_sq, max_norm: as in
            :func:`~amp_kernels.ops.adamw.adamw_`; ``steps`` are counted, but do not enter the formula.
        exp_avgs: one flat float32 or bfloat16 buffer per block; updated.
        lr, beta1, beta2, weight_decay: one value per param group.
        flags: per group, 1 (maximize) or 0.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN.
    """
    for name, values in (("lr", lr), ("weight_decay", weight_decay)):
        for i, value in enumerate(values):
            _lists.check_number("lion_", f"{name}[{i}]", value, 0.0)
    for name, values in (("beta1", beta1), ("beta2", beta2)):
        _blocks.check_betas("lion_", name, values)
    if sum_sq is not None:
        _lists.check_number("lion_", "max_norm", max_norm, 0.0)
    _blocks.check_update(
        "lion_",
        params,
        grads,
        {
            "exp_avgs": (exp_avgs, (torch.float32, torch.bfloat16)),
            "masters": (masters, (torch.float32, torch.int16)),
            "shadows": (shadows, HALVES),
        },
        steps,
        layout,
        lrs,
        {"grad_scale": grad_scale, "found_inf": found_inf, "sum_sq": sum_sq},
        {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "flags": flags},
    )
    op(
        params,
        grads,
        exp_avgs,
        steps,
        masters,
        shadows,
        layout,
        lrs,
        grad_scale,
        found_inf,
        sum_sq,
        lr,
        beta1,
        beta2,
        weight_decay,
        flags,
        max_norm,
    )
