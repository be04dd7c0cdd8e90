"""adamw_'s CUDA kernels (``csrc/kernels/adamw.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from ..ops._blocks import COUPLED_DECAY, MAXIMIZE
from . import Memory, _update


def launch(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
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
    eps: Sequence[float],
    weight_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
) -> None:
    """``amp_kernels::adamw_``; see ``amp_kernels/ops/adamw.py``."""
    memory = Memory()
    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    entries = _update.params_of(memory, params, grads, moments, steps, masters, shadows, layout)
    lr_at = _update.lr_addresses(memory, lrs, len(lr))
    groups = [
        _emulator.AdamWGroup(
            lr[g],
            beta1[g],
            beta2[g],
            eps[g],
            weight_decay[g],
            bool(flags[g] & COUPLED_DECAY),
            lr_at[g],
            bool(flags[g] & MAXIMIZE),
        )
        for g in range(len(lr))
    ]
    decisions = _update.decisions_of(memory, grad_scale, found_inf, sum_sq, max_norm)
    _emulator.adamw(memory.pieces, entries, groups, decisions)
