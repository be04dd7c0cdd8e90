"""The kernels that a piece of code launches on the GPU, and a guard against waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def no_waits(forbidden: bool = True) -> Iterator[None]:
    """Within the block a wait of the host for the GPU is an error, where that is ``forbidden``."""
    if forbidden:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(function: Callable[[], object]) -> list[str]:
    """The names of the kernels that ``function`` launches, in the order in which they ran; copies and fills of memory
    (which the profiler calls Memcpy and Memset) are left out."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        function()
        torch.cuda.synchronize()
    return kernel_names(recorded.events())


def kernel_names(events) -> list[str]:
    """The kernels among a profile's events. Named ranges (``record_function``, an optimizer's step) appear on the device's track as
    well, and are none."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    on_device.sort(key=lambda e: e.time_range.start)
    return [e.name for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]
