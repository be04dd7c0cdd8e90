"""One SGD step over a list of parameters: unscale, clip, momentum, master, 16-bit weight, all in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._dispatch.library import Sample, define
from . import _blocks
from ._blocks import MAXIMIZE, NESTEROV, STOCHASTIC, StepScalars, Weight, fma, piece, rounded


def _reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
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
    momentum: Sequence[float],
    dampening: Sequence[float],
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
        buffer = piece(momentum_buffers[block], offset, param.numel())
        rate = lrs[group].reshape(()).double() if lrs else lr[group]
        step = steps[block][slot] + 1
        weight = Weight.at(param, row, masters, shadows, emas, ema_decay, flags, seed, step)

        p = weight.load()
        g = scalars.gradient(grad, flags[group])
        if weight_decay[group] != 0:
            g = fma(rounded(weight_decay[group]), p, g)
        if buffer is not None:
            keep = rounded(momentum[group])
            history = fma(keep, buffer.float(), g * rounded(1 - dampening[group]))
            updated = torch.where(step == 1, g, history)  # the first step that is taken starts the buffer, as in torch
            scalars.store(buffer, updated)
            g = fma(keep, updated, g) if flags[group] & NESTEROV else updated
        p = fma(rounded(-rate), g, p)

        weight.store(scalars, p)
        scalars.store(steps[block][slot], step)


def samples(device: str) -> Iterator[Sample]:
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32

    def call(seed, dtypes, *, momentum=0.9, dampening=0.0, **options) -> Sample:
        args, kwargs = _blocks.sample_call(device, seed, dtypes, 1, momentum, dampening, 1e-4, lr=1e-2, **options)
        if not momentum:
            args = (*args[:2], [buffer[:0] for buffer in args[2]], *args[3:])
        return args, kwargs

    yield call(20, [f32])
    yield call(21, [f32, bf16, f16], momentum=0.0, scale=256.0, found=0.0, max_norm=1.0)
    yield call(22, [f32], dampening=0.1, shadow=bf16, grad_dtype=f16)
    yield call(23, [bf16, f16], master=torch.int16, flags=NESTEROV, max_norm=100.0)
    yield call(24, [bf16, f32], master=f32, flags=MAXIMIZE, lrs=True)
    yield call(25, [f16], master=torch.int16, state_dtype=bf16)
    yield call(26, [f32, f16], found=1.0, scale=4.0, master=f32, shadow=f16)  # skipped
    yield call(27, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(28, [bf16, f32], momentum=0.0, flags=STOCHASTIC, ema=True, found=1.0)  # skipped
    yield call(29, [f16, f32], master=torch.int16, shadow=bf16, ema=True)


op = define(
    "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] steps, "
    "Tensor(d!)[] masters, Tensor(e!)[] shadows, Tensor(f!)[] emas, Tensor layout, Tensor[] lrs, Tensor? grad_scale, "
    "Tensor? found_inf, Tensor? sum_sq, float[] lr, float[] momentum, float[] dampening, float[] weight_decay, "
    "float[] ema_decay, int[] flags, float max_norm, int seed) -> ()",
    _reference,
    samples=samples,
)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
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
    momentum: Sequence[float],
    dampening: Sequence[float],
    weight_decay: Sequence[float],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    """One SGD step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    With ``g = grad / grad_scale * clip`` and ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))``, in float32 whatever
    is stored::

        step += 1;  g += weight_decay * p;  buffer = g if step == 1 else momentum * buffer + (1 - dampening) * g
        p -= lr * (g + momentum * buffer if nesterov else buffer)

    as :class:`torch.optim.SGD`. The first step is the first one that is *taken*: a momentum buffer that an overflow
    left unwritten is never read. Without a momentum buffer ``p -= lr * g``. State layout: see
    :mod:`amp_kernels.ops._blocks`.

    Args:
        params, grads, steps, masters, shadows, emas, layout, lrs, grad_scale, found_inf, sum_sq, ema_decay, max_norm,
            seed: as in :func:`~amp_kernels.ops.adamw.adamw_`.
        momentum_buffers: one flat float32 or bfloat16 buffer per block, or 0 elements for a block without momentum;
            updated.
        lr, momentum, dampening, weight_decay: one value per param group.
        flags: per group, sum of 1 (maximize), 2 (nesterov) and 8 (stochastic rounding).

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN.
    """
    _blocks.checked_call(op, locals())
