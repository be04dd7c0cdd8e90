"""Asynchronous readback of device tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class AsyncReader:
    """A FIFO queue of small tensors that are copied to the host.

    A CUDA tensor is copied to pinned memory on its stream; an event marks its arrival. A CPU tensor arrives immediately. Tensors
    of other devices are copied synchronously.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[Tensor | list[float], torch.cuda.Event | None, Any]]
        self._pending = collections.deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # pinned memory and events for reuse

    def push(self, value: Tensor, note: Any = None) -> None:
        """Start to read ``value``, a 1-D tensor, in stream order. ``note`` is returned with it."""
        if not value.is_cuda:
            self._pending.append((value.tolist(), None, note))
            return
        host, event = self._slot(value)
        host.copy_(value.detach() if value.requires_grad else value, non_blocking=True)
        event.record(torch.cuda.current_stream(value.get_device()))  # an index is looked up faster than a device
        self._pending.append((host, event, note))

    def put(self, values: list[float], note: Any = None) -> None:
        """Add values that are already on the host."""
        self._pending.append((values, None, note))

    def _slot(self, value: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for ``value`` and an event of its device, reused if possible: new ones take several driver calls."""
        while self._spare:
            host, event = self._spare.pop()
            if (host.shape, host.dtype, event.device) == (value.shape, value.dtype, value.device):
                return host, event
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True), torch.cuda.Event()

    def _read(self, host: Tensor, event: torch.cuda.Event) -> list[float]:
        """The values of an entry that has arrived from a GPU."""
        values = host.tolist()
        self._spare.append((host, event))
        return values

    def arrived(self) -> list[tuple[list[float], Any]]:
        """Take arrived entries with their notes, oldest first, up to the first pending one."""
        taken = []
        while self._pending and (self._pending[0][1] is None or self._pending[0][1].query()):
            host, event, note = self._pending.popleft()
            taken.append((host if event is None else self._read(host, event), note))
        return taken

    def all_but_last(self) -> Iterator[tuple[list[float], Any]]:
        """Take all entries except the last, waiting for them, so that every rank takes the same. Takes the last one too if it
        was already on the host."""
        while len(self._pending) > 1 or (self._pending and self._pending[0][1] is None):
            host, event, note = self._pending.popleft()
            if event is not None:
                event.synchronize()
                host = self._read(host, event)
            yield host, note

    def wait(self) -> None:
        """Wait until all entries have arrived."""
        if self._pending and self._pending[-1][1] is not None:
            self._pending[-1][1].synchronize()

    def clear(self) -> None:
        self._pending.clear()

    def __len__(self) -> int:
        return len(self._pending)
