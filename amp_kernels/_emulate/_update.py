"""What the emulated optimizer kernels share: parameters and their state as ``_emulator.Param``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory


def params_of(
    memory: Memory,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: dict[str, Sequence[Tensor]],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    layout: Tensor,
) -> list[_emulator.Param]:
    """The kernel's view of each parameter; ``layout`` says where in the buffers of its block its state lies."""
    state = {**moments, "steps": steps, "masters": masters, "shadows": shadows}
    for name, buffers in state.items():
        for i, buffer in enumerate(buffers):
            memory.add(f"{name}[{i}]", buffer)

    def address(buffer: Tensor, index: int) -> int:
        return buffer.data_ptr() + index * buffer.element_size()

    entries = []
    for i, (param, grad, (block, offset, slot, group)) in enumerate(zip(params, grads, layout.tolist(), strict=True)):
        entry = _emulator.Param(
            memory.add(f"params[{i}]", param),
            DTYPE_CODES[param.dtype],
            memory.add(f"grads[{i}]", grad),
            DTYPE_CODES[grad.dtype],
            param.numel(),
            address(steps[block], slot),
            group,
        )
        for which, buffers in enumerate(moments.values()):
            if buffers[block].numel() > 0:
                entry.set_moment(which, address(buffers[block], offset), DTYPE_CODES[buffers[block].dtype])
        if masters[block].numel() > 0:
            entry.set_master(address(masters[block], offset), masters[block].dtype == torch.int16)
        if shadows[block].numel() > 0:
            entry.set_shadow(address(shadows[block], offset), DTYPE_CODES[shadows[block].dtype])
        entries.append(entry)
    return entries


def lr_addresses(memory: Memory, lrs: Sequence[Tensor], groups: int) -> list[int]:
    """Where each group's learning rate lies, 0 where the host's number counts."""
    return [memory.add(f"lrs[{i}]", lr) for i, lr in enumerate(lrs)] or [0] * groups


def decisions_of(
    memory: Memory, grad_scale: Tensor | None, found_inf: Tensor | None, sum_sq: Tensor | None, max_norm: float
) -> tuple[int, int, int, float]:
    named = (("grad_scale", grad_scale), ("found_inf", found_inf), ("sum_sq", sum_sq))
    return (*(memory.add(name, tensor) for name, tensor in named), max_norm)
