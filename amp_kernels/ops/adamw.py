"""One AdamW (or Adam) step over a list of parameters: unscale, clip, moments, master, 16-bit weight, all in one
pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._dispatch.library import Sample, define
from . import _blocks
from ._blocks import COUPLED_DECAY, MAXIMIZE, STOCHASTIC, StepScalars, Weight, fma, piece, rounded, sqrt


def _reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
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
        max_exp_avg_sq = piece(max_exp_avg_sqs[block], offset, n)
        rate = lrs[group].reshape(()).double() if lrs else lr[group]
        decay = weight_decay[group]

        step = steps[block][slot] + 1
        weight = Weight.at(param, row, masters, shadows, emas, ema_decay, flags, seed, step)
        correction1 = 1 - beta1[group] ** step.double()
        correction2 = 1 - beta2[group] ** step.double()

        p, m, v = weight.load(), exp_avg.float(), exp_avg_sq.float()
        g = scalars.gradient(grad, flags[group])
        if not flags[group] & COUPLED_DECAY:
            p = p * rounded(1 - rate * decay)
        elif decay != 0:
            g = fma(rounded(decay), p, g)
        m = fma(rounded(1 - beta1[group]), g - m, m)
        v = fma(g * rounded(1 - beta2[group]), g, v * rounded(beta2[group]))
        largest = v if max_exp_avg_sq is None else torch.maximum(max_exp_avg_sq.float(), v)
        denom = sqrt(largest) / rounded(correction2.sqrt()) + rounded(eps[group])
        p = fma(rounded(-rate / correction1), m / denom, p)

        weight.store(scalars, p)
        scalars.store(exp_avg, m)
        scalars.store(exp_avg_sq, v)
        if max_exp_avg_sq is not None:
            scalars.store(max_exp_avg_sq, largest)
        scalars.store(steps[block][slot], step)


def samples(device: str) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32

    def call(seed, dtypes, *, decay=0.01, amsgrad=False, **options) -> Sample:
        args, kwargs = _blocks.sample_call(device, seed, dtypes, 3, 0.9, 0.999, 1e-8, decay, lr=1e-3, **options)
        return (args if amsgrad else (*args[:4], [buffer[:0] for buffer in args[4]], *args[5:])), kwargs

    yield call(10, [f32])
    yield call(11, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(12, [f32], grad_dtype=f16, shadow=f16, scale=8.0)
    yield call(13, [f32, bf16], shadow=bf16, master=f32, grad_dtype=bf16)
    yield call(14, [f16, bf16], master=torch.int16, max_norm=100.0)
    yield call(15, [bf16], master=torch.int16, state_dtype=bf16)
    yield call(16, [f32], flags=MAXIMIZE, decay=0.0, lrs=True)
    yield call(17, [f32, f16], flags=COUPLED_DECAY, master=f32, lrs=True)
    yield call(18, [f32, bf16, f16], found=2.0, scale=4.0, master=torch.int16, shadow=f16)  # skipped
    yield call(19, [f32, f16], amsgrad=True, ema=True, master=f32)
    yield call(190, [bf16, f16, f32], amsgrad=True, state_dtype=bf16, flags=STOCHASTIC, ema=True)
    yield call(191, [bf16, f16], flags=STOCHASTIC | MAXIMIZE, master=torch.int16, ema=True)
    yield call(192, [f32, bf16], amsgrad=True, ema=True, flags=STOCHASTIC, found=1.0)  # skipped


op = define(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, Tensor(f!)[] masters, Tensor(g!)[] shadows, Tensor(h!)[] emas, "
    "Tensor layout, Tensor[] lrs, Tensor? grad_scale, Tensor? found_inf, Tensor? sum_sq, float[] lr, float[] beta1, "
    "float[] beta2, float[] eps, float[] weight_decay, float[] ema_decay, int[] flags, float max_norm, int seed) -> ()",
    _reference,
    samples=samples,
)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
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
    """One AdamW step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    With ``g = grad / grad_scale * clip`` and ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))`` (the formula of
    :func:`torch.nn.utils.clip_grad_norm_`), in float32 whatever is stored::

        step += 1;  p *= 1 - lr * weight_decay;  m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    the order of operations of :class:`torch.optim.AdamW`'s single-tensor form (Loshchilov and Hutter, ICLR 2019); with
    AMSGrad (Reddi et al., ICLR 2018) ``v_max = max(v_max, v)`` stands under the root. ``p`` is the float32 master if
    there is one; the parameter and the shadow receive it rounded, and the average becomes ``ema += (1 - ema_decay) *
    (p - ema)``. State layout: see :mod:`amp_kernels.ops._blocks`.

    Args:
        params: float16, bfloat16 or float32, dense, one device; updated.
        grads: same shapes and strides as ``params``, float16, bfloat16 or float32 whatever the param's dtype; only
            read.
        exp_avgs, exp_avg_sqs: first and second moments, one flat float32 or bfloat16 buffer per block; updated.
        max_exp_avg_sqs: the largest second moments so far, of a dtype as the moments, or 0 elements for a block without
            AMSGrad; updated.
        steps: one float32 buffer per block, one counter per param; incremented.
        masters: per block float32 masters or int16 remainders of 16-bit params, or 0 elements; updated.
        shadows: per block a float16 or bfloat16 copy of float32 params, or 0 elements; overwritten.
        emas: per block float32 exponential moving averages of the float32 weights, or 0 elements; updated.
        layout: int64 ``[n, 5]`` on the CPU, row ``(block, offset, slot, group, index)`` for each param.
        lrs: empty, or one float32 scalar per group that replaces ``lr`` and is read on the device.
        grad_scale: loss scale the grads still carry, float32 scalar; ``None`` means 1.
        found_inf: float32 scalar; if it is above 0 nothing changes, step counters included. ``None`` never skips.
        sum_sq: squared norm of the unscaled grads (:func:`~amp_kernels.ops.check_and_norm.check_and_norm`); ``None``
            does not clip.
        lr, beta1, beta2, eps, weight_decay, ema_decay: one value per param group.
        flags: per group, sum of 1 (maximize), 4 (coupled L2 decay: Adam instead of AdamW) and 8 (stochastic rounding of
            16-bit params without a master, instead of to nearest even).
        max_norm: norm to clip to; read only if ``sum_sq`` is given.
        seed: 0 to 2^63 - 1; with ``index``, step and element it decides the random bits (:mod:`._stochastic`).

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN.
    """
    _blocks.checked_call(op, locals())
