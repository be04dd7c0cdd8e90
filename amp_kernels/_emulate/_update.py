"""What the emulated optimizer kernels share: parameters and their state as ``_emulator.Param``, and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _emulator
from ..ops._blocks import MAXIMIZE, STOCHASTIC
from . import DTYPE_CODES, Memory


def _params_of(
    memory: Memory,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: dict[str, Sequence[Tensor]],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    emas: Sequence[Tensor],
    layout: Tensor,
    flags: Sequence[int],
) -> list[_emulator.Param]:
    """The kernel's view of each parameter; ``layout`` says where in the buffers of its block its state lies."""
    state = {**moments, "steps": steps, "masters": masters, "shadows": shadows, "emas": emas}
    for name, buffers in state.items():
        for i, buffer in enumerate(buffers):
            memory.add(f"{name}[{i}]", buffer)

    def address(buffer: Tensor, index: int) -> int:
        return buffer.data_ptr() + index * buffer.element_size()

    entries = []
    rows = zip(params, grads, layout.tolist(), strict=True)
    for i, (param, grad, (block, offset, slot, group, index)) in enumerate(rows):
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
        if emas[block].numel() > 0:
            entry.set_ema(address(emas[block], offset))
        if flags[group] & STOCHASTIC:
            entry.set_stochastic(index)
        entries.append(entry)
    return entries


def _lr_addresses(memory: Memory, lrs: Sequence[Tensor], groups: int) -> list[int]:
    """Where each group's learning rate lies, 0 where the host's number counts."""
    return [memory.add(f"lrs[{i}]", lr) for i, lr in enumerate(lrs)] or [0] * groups


def launch(
    kernel: Callable[..., None],
    group_type: Callable[..., object],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: dict[str, Sequence[Tensor]],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    shadows: Sequence[Tensor],
    emas: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    sum_sq: Tensor | None,
    options: Sequence[tuple[float, ...]],
    ema_decay: Sequence[float],
    flags: Sequence[int],
    max_norm: float,
    seed: int,
) -> None:
    """One step; the arguments are the ops'. ``options``: for each group the values of the optimizer's C++ Options."""
    memory = Memory()
    entries = _params_of(memory, params, grads, moments, steps, masters, shadows, emas, layout, flags)
    lr_at = _lr_addresses(memory, lrs, len(options))
    groups = [
        group_type(*values, address, bool(flag & MAXIMIZE), decay)
        for values, address, flag, decay in zip(options, lr_at, flags, ema_decay, strict=True)
    ]
    named = (("grad_scale", grad_scale), ("found_inf", found_inf), ("sum_sq", sum_sq))
    decisions = (*(memory.add(name, tensor) for name, tensor in named), max_norm)
    kernel(memory.pieces, entries, groups, decisions, seed)
