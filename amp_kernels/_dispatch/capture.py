"""Recording launches into a CUDA graph: whether that is done now or rehearsed, and a capture that may fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Rehearsal(threading.local):
    active = False


_rehearsal = _Rehearsal()


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether what is launched on ``tensor`` now is recorded: the host's part of the call will not run again."""
    return _rehearsal.active or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def rehearsal(active: bool = True) -> Iterator[None]:
    """Within the block this thread behaves as if it captured, on any device, and everything still runs."""
    before, _rehearsal.active = _rehearsal.active, active
    try:
        yield
    finally:
        _rehearsal.active = before


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Within the block launches on the current device are recorded into ``graph``, as by ``torch.cuda.graph``, which has one stream
    for all captures, of the device that was current at the first. One that fails leaves no trace.

    Where the end of a capture raises, torch 2.11 leaves its own stream the current one and the device's generator capturing:
    from then on whatever draws random numbers raises, replays of other graphs too. The next capture that succeeds ends that,
    so there is one, of next to nothing. Seed and offset are as before: no capture changes them. Nor does torch tell its
    allocator that such a capture is over, which would then hold back memory that several streams used.
    """
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream(stream.device)):
            yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it knows, where the end did not raise
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            torch._C._cuda_releasePool(stream.device.index, pool)
        with contextlib.suppress(RuntimeError):  # of a broken context: what broke it is raised
            torch.cuda.set_stream(stream)
            number = torch.zeros(1, device=stream.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(stream.device)):
                number.zero_()  # torch warns of an empty graph
        raise
