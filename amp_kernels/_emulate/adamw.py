"""adamw_'s CUDA kernels (``csrc/kernels/adamw.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _emulator
from ..ops._blocks import COUPLED_DECAY, MAXIMIZE
from . import DTYPE_CODES, Memory


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
    blocks = [
        {
            "exp_avg": (memory.add(f"exp_avgs[{i}]", exp_avgs[i]), exp_avgs[i]),
            "exp_avg_sq": (memory.add(f"exp_avg_sqs[{i}]", exp_avg_sqs[i]), exp_avg_sqs[i]),
            "step": (memory.add(f"steps[{i}]", steps[i]), steps[i]),
            "master": (memory.add(f"masters[{i}]", masters[i]), masters[i]),
            "shadow": (memory.add(f"shadows[{i}]", shadows[i]), shadows[i]),
        }
        for i in range(len(exp_avgs))
    ]
    entries = []
    for i, (param, grad, (block, offset, slot, group)) in enumerate(zip(params, grads, layout.tolist(), strict=True)):

        def place(name: str, index: int, state=blocks[block]) -> int:
            address, tensor = state[name]
            return address + index * tensor.element_size()

        def dtype(name: str, state=blocks[block]) -> int:
            return DTYPE_CODES[state[name][1].dtype]

        entry = _emulator.AdamWParam(
            memory.add(f"params[{i}]", param),
            DTYPE_CODES[param.dtype],
            memory.add(f"grads[{i}]", grad),
            DTYPE_CODES[grad.dtype],
            param.numel(),
            group,
        )
        entry.set_moments(
            place("exp_avg", offset),
            dtype("exp_avg"),
            place("exp_avg_sq", offset),
            dtype("exp_avg_sq"),
            place("step", slot),
        )
        if masters[block].numel() > 0:
            entry.set_master(place("master", offset), masters[block].dtype == torch.int16)
        if shadows[block].numel() > 0:
            entry.set_shadow(place("shadow", offset), dtype("shadow"))
        entries.append(entry)
    groups = [
        (
            lr[g],
            beta1[g],
            beta2[g],
            eps[g],
            weight_decay[g],
            bool(flags[g] & COUPLED_DECAY),
            bool(flags[g] & MAXIMIZE),
            memory.add(f"lrs[{g}]", lrs[g] if lrs else None),
        )
        for g in range(len(lr))
    ]
    decisions = [
        memory.add(name, tensor)
        for name, tensor in (("grad_scale", grad_scale), ("found_inf", found_inf), ("sum_sq", sum_sq))
    ]
    _emulator.adamw(memory.pieces, entries, groups, *decisions, max_norm)
