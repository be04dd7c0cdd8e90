"""The peak of torch's CPU allocator."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_peak() -> Iterator[list[int]]:
    """Within the block, the most bytes that torch's CPU allocator held on top of what it held before: the list's one element after it.

    The process's resident size would mostly show the interpreter, libtorch and scratch space of the BLAS.
    """
    peak: list[int] = []
    with torch.autograd.profiler.profile(profile_memory=True, acc_events=True) as profile:
        yield peak
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    current = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        highest = max(highest, current)
    peak.append(highest)
