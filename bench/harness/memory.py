"""Memory that a step takes: what objects hold, and the peak of torch's CPU allocator."""

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


def held_bytes(*owners) -> int:
    """Bytes of all tensors that `owners` keep (optimizers, lists, objects of this project), shared storage counted once.

    Gradients do not count: they belong to tensors, not to owners.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    pending = list(owners)
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            # Codes and scales of a quantized tensor.
            if hasattr(item, "__tensor_flatten__") and not hasattr(item, "_local_tensor"):
                pending += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
                continue
            storage = getattr(item, "_local_tensor", item).untyped_storage()  # of a DTensor its shard
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
        elif isinstance(item, torch.optim.Optimizer) or type(item).__module__.startswith("amp_kernels"):
            pending += vars(item).values() if hasattr(item, "__dict__") else ()
    sizes.pop(0, None)  # empty tensors
    return sum(sizes.values())
