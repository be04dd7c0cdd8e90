"""lion_'s CUDA kernels (``csrc/kernels/lion.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from . import _update


def launch(
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
    """``amp_kernels::lion_``; see ``amp_kernels/ops/lion.py``."""
    options = list(zip(lr, beta1, beta2, weight_decay, strict=True))
    state = params, grads, {"exp_avgs": exp_avgs}, steps, masters, shadows, emas, layout
    tensors = lrs, grad_scale, found_inf, sum_sq
    _update.launch(_emulator.lion, _emulator.LionGroup, *state, *tensors, options, ema_decay, flags, max_norm, seed)
