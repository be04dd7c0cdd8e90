"""sgd_'s CUDA kernels (``csrc/kernels/sgd.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from ..ops._blocks import MAXIMIZE, NESTEROV
from . import Memory, _update


def launch(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    lr: Sequence[float],
    momentum: Sequence[float],
    dampening: Sequence[float],
    weight_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
) -> None:
    """``amp_kernels::sgd_``; see ``amp_kernels/ops/sgd.py``."""
    memory = Memory()
    moments = {"momentum_buffers": momentum_buffers}
    entries = _update.params_of(memory, params, grads, moments, steps, masters, shadows, layout)
    lr_at = _update.lr_addresses(memory, lrs, len(lr))
    groups = [
        _emulator.SgdGroup(
            lr[g],
            momentum[g],
            dampening[g],
            weight_decay[g],
            bool(flags[g] & NESTEROV),
            lr_at[g],
            bool(flags[g] & MAXIMIZE),
        )
        for g in range(len(lr))
    ]
    decisions = _update.decisions_of(memory, grad_scale, found_inf, sum_sq, max_norm)
    _emulator.sgd(memory.pieces, entries, groups, decisions)
