"""Tensors on several devices: grouped, moved without a sync, restored, flags combined."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


@overload
def at(tensor: Tensor, device: torch.device) -> Tensor: ...
@overload
def at(tensor: None, device: torch.device) -> None: ...
def at(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor on ``device``, copied asynchronously except to the CPU, where it is read at once."""
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


class Copies(_MultiDeviceReplicator):
    """Copies of a tensor on each device that asks for one. torch's class returns before a copy to the CPU has arrived."""

    def get(self, device: torch.device) -> Tensor:
        if device.type == "cpu" and device not in self._per_device_tensors:
            self._per_device_tensors[device] = self.master.to(device, copy=True)
        return super().get(device)


def restorer(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Copy the tensors. Returns a function that writes the copies back."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, copy in copies:
            tensor.copy_(copy)

    return restore


def host_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in pages of its own, which go back to the system with it. Many large tensors from malloc, one after another with small
    pieces between them, leave holes that the next one does not fit into."""
    nbytes = shape.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(shape)


def largest_flag(flags: Iterable[Tensor | None], device: torch.device) -> Tensor | None:
    """The maximum of several flags, on ``device``; unlike their sum it stays 0 or 1."""
    moved = []
    for flag in flags:
        if flag is not None:
            flag = at(flag, device)
            moved.append(flag if flag.dim() == 0 else flag.reshape(()))
    return None if not moved else moved[0] if len(moved) == 1 else torch.stack(moved).amax()
