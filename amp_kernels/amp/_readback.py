"""Values of device tensors, read on the host without waiting for the device."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class AsyncReader:
    """A queue of small tensors on their way to the host, in the order in which they were pushed.

    A CUDA tensor is copied to pinned memory by its stream, and an event tells when it is there. A CPU tensor has
    arrived at once. (A tensor of another device is copied synchronously.)
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[Tensor | list[float], torch.cuda.Event | None, Any]]
        self._pending = collections.deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # pinned memory that was read, with its event

    def push(self, value: Tensor, note: Any = None) -> None:
        """Read ``value``, a 1-D tensor, as it is now in its stream's order. ``note`` comes back with it."""
        if not value.is_cuda:
            self.put(value.tolist(), note)
            return
        host, event = self._slot(value)
        host.copy_(value.detach() if value.requires_grad else value, non_blocking=True)
        event.record(torch.cuda.current_stream(value.get_device()))  # an index is looked up faster than a device
        self._pending.append((host, event, note))

    def put(self, values: list[float], note: Any = None) -> None:
        """Add what the host knows already."""
        self._pending.append((values, None, note))

    def _slot(self, value: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for ``value`` and an event of its device: those of a value that was read, as a rule, because new ones
        are several calls of the driver each time."""
        while self._spare:
            host, event = self._spare.pop()
            if (host.shape, host.dtype, event.device) == (value.shape, value.dtype, value.device):
                return host, event
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True), torch.cuda.Event()

    def _read(self, host: Tensor | list[float], event: torch.cuda.Event | None) -> list[float]:
        """What has arrived."""
        if isinstance(host, list):
            return host
        values = host.tolist()
        self._spare.append((host, event))
        return values

    def arrived(self) -> Iterator[tuple[list[float], Any]]:
        """Take what has arrived, oldest first, with its note; stops at the first that is still on its way."""
        while self._pending and (self._pending[0][1] is None or self._pending[0][1].query()):
            host, event, note = self._pending.popleft()
            yield self._read(host, event), note

    def all_but_last(self) -> Iterator[tuple[list[float], Any]]:
        """Take what was pushed before the last value, and wait for it: the same on every rank. The last one is taken too if
        it never had to travel."""
        while len(self._pending) > 1 or (self._pending and self._pending[0][1] is None):
            host, event, note = self._pending.popleft()
            if event is not None:
                event.synchronize()
            yield self._read(host, event), note

    def wait(self) -> None:
        """Wait for the device, so that everything pushed so far has arrived."""
        if self._pending and self._pending[-1][1] is not None:
            self._pending[-1][1].synchronize()

    def clear(self) -> None:
        self._pending.clear()

    def __len__(self) -> int:
        return len(self._pending)
