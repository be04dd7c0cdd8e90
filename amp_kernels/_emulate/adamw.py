"""adamw_'s CUDA kernels (``csrc/kernels/adamw.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from ..ops._blocks import COUPLED_DECAY
from . import _update


def launch(
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
    """``amp_kernels::adamw_``; see ``amp_kernels/ops/adamw.py``."""
    coupled = [bool(flag & COUPLED_DECAY) for flag in flags]
    options = list(zip(lr, beta1, beta2, eps, weight_decay, coupled, strict=True))
    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "max_exp_avg_sqs": max_exp_avg_sqs}
    state = params, grads, moments, steps, masters, shadows, emas, layout
    tensors = lrs, grad_scale, found_inf, sum_sq
    _update.launch(_emulator.adamw, _emulator.AdamWGroup, *state, *tensors, options, ema_decay, flags, max_norm, seed)
