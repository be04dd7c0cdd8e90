"""Out of memory inside an op, as the exception that training frameworks look for."""

import re

import torch

# Messages of failed allocations, of torch, of C++ and of LibTorch's stable ABI. The ABI reports that a call of torch failed, but not
# why: a call that only allocates, with checked arguments, has no other reason.
_ALLOCATIONS = re.compile(
    r"out of memory|can't allocate memory|bad_alloc"
    r"|(aoti_torch_empty_strided|\"aten::(empty|new_empty|contiguous|clone|to)\").*API call failed"
)


def translated(op: str, error: RuntimeError) -> RuntimeError:
    """``torch.OutOfMemoryError`` if that is what happened, else ``error``."""
    if isinstance(error, torch.OutOfMemoryError) or not _ALLOCATIONS.search(str(error)):
        return error
    return torch.OutOfMemoryError(f"{op}: out of memory ({str(error).splitlines()[0]})")
