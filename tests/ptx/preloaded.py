"""For processes in which the fake CUDA runtime is preloaded: the interpreter behind it, and the package on its device."""

import functools
import os
import sys
from pathlib import Path

import torch

from tools.ptx.aten import replace_cuda_kernels
from tools.ptx.host import Machine


@functools.cache
def machine() -> Machine:
    """The interpreter, with the package's CUDA library of PTX loaded in place of the one with machine code."""
    assert "amp_kernels" not in sys.modules, "the package has loaded its own CUDA library: see plugin.py"
    load_library = torch.ops.load_library
    library = os.environ["AK_PTX_LIBRARY"]
    torch.ops.load_library = lambda path: load_library(library if Path(path).name == Path(library).name else path)
    from amp_kernels._dispatch import load

    torch.ops.load_library = load_library
    if load._absent.pop("cuda", None):
        load_library(library)
    replace_cuda_kernels()
    torch.cuda.get_device_capability = capability_of
    load.cuda_archs = lambda: ("8.0+PTX", "9.0a")
    return Machine(Path(os.environ["LD_PRELOAD"]), Path(library))


def capability_of(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """In place of torch.cuda.get_device_capability, which asks a device once."""
    index = device if isinstance(device, int) else torch.device(device).index if device is not None else None
    return divmod(machine().devices[torch.cuda.current_device() if index is None else index].capability, 10)


def set_chip(capability: int, sm_count: int, device: int = 0) -> Machine:
    """The device becomes a chip of that compute capability."""
    it = machine()
    from amp_kernels._dispatch import policy

    # Shared memory of a block: CUDA C++ Programming Guide, technical specifications per compute capability.
    it.set_chip(capability, sm_count, {75: 64, 80: 163, 90: 227, 120: 99}[capability] * 1024, device)
    policy.UNTIMED = ()  # the kernels of mma.sync are what the tests are for
    for cached in (policy._select, policy._looks, policy._winner):
        cached.cache_clear()
    return it
