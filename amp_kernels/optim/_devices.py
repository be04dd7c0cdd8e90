"""Tensors of several devices: told apart, moved without a sync, flags combined."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def at(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return tensor if tensor is None or tensor.device == device else tensor.to(device, non_blocking=True)


def largest_flag(flags: Iterable[Tensor | None], device: torch.device) -> Tensor | None:
    """One flag out of several, on ``device``. Their maximum and not their sum, so that it stays 0 or 1."""
    moved = [at(flag, device) for flag in flags if flag is not None]
    moved = [flag if flag.dim() == 0 else flag.reshape(()) for flag in moved]
    return None if not moved else moved[0] if len(moved) == 1 else torch.stack(moved).amax()
