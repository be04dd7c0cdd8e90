"""Capture of CUDA graphs: detection, rehearsal on any device, and cleanup after a failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Rehearsal(threading.local):
    active = False


_rehearsal = _Rehearsal()


def is_capturing(tensor: torch.Tensor) -> bool:
    """True if a launch on ``tensor`` is captured now, so that a replay will not run the host's part of the call."""
    return _rehearsal.active or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def rehearsal(active: bool = True) -> Iterator[None]:
    """Within the block this thread behaves as during a capture, on any device, while all launches still run."""
    before, _rehearsal.active = _rehearsal.active, active
    try:
        yield
    finally:
        _rehearsal.active = before


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Within the block launches on the current device are captured into ``graph``. A capture that fails leaves no trace.

    ``torch.cuda.graph`` has one default stream for all captures, of the device that was current at the first; here each capture
    gets a stream of the current device. If the end of a capture raises, torch 2.11 leaves its own stream the current one and the
    device's generator capturing: everything that draws random numbers then raises, replays of other graphs included. The next
    successful capture ends that, so this function makes a minimal one, which changes neither seed nor offset. torch also does not
    tell its allocator that the failed capture is over, which would hold back memory that several streams used.
    """
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream(stream.device)):
            yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # raised if the allocator knows already
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            torch._C._cuda_releasePool(stream.device.index, pool)
        with contextlib.suppress(RuntimeError):  # raised in a broken context, whose own error is raised below
            torch.cuda.set_stream(stream)
            number = torch.zeros(1, device=stream.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(stream.device)):
                number.zero_()  # torch warns of an empty graph
        raise
