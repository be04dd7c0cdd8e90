"""sgd_'s CUDA kernels (``csrc/kernels/sgd.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from ..ops._blocks import NESTEROV
from . import _update


def launch(
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
    """``amp_kernels::sgd_``; see ``amp_kernels/ops/sgd.py``."""
    nesterov = [bool(flag & NESTEROV) for flag in flags]
    options = list(zip(lr, momentum, dampening, weight_decay, nesterov, strict=True))
    state = params, grads, {"momentum_buffers": momentum_buffers}, steps, masters, shadows, emas, layout
    tensors = lrs, grad_scale, found_inf, sum_sq
    _update.launch(_emulator.sgd, _emulator.SgdGroup, *state, *tensors, options, ema_decay, flags, max_norm, seed)
