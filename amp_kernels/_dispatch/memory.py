"""Out of memory inside an op, as the exception that training frameworks look for."""

import re

import torch

# What an allocation that failed is called: by torch, by C++, and by LibTorch's stable ABI, which passes on that a call of torch
# failed, but not why. Its arguments having been checked, a call that only allocates has no other reason.
_ALLOCATIONS = re.compile(
    r"out of memory|can't allocate memory|bad_alloc"
    r"|(aoti_torch_empty_strided|\"aten::(empty|new_empty|contiguous|clone|to)\").*API call failed"
)


def translated(op: str, error: RuntimeError) -> RuntimeError:
    """``torch.OutOfMemoryError`` if that is what happened, else ``error``."""
    if isinstance(error, torch.OutOfMemoryError) or not _ALLOCATIONS.search(str(error)):
        return error
    return torch.OutOfMemoryError(f"{op}: out of memory ({str(error).splitlines()[0]})")
