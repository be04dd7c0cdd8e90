"""A driver for Triton whose device is the interpreter: kernels are compiled for the chip, and their PTX is launched with what Triton's own
launcher passes (triton/backends/nvidia/driver.py and driver.c).

Triton 3.6 leaves out proxy fences after mbarrier.init and between cp.async and wgmma, and lets two warps store the same value. Its use
of shared memory is not checked; memory that kernels share, and results under any schedule, are ours.
"""

import ctypes
import struct
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from .host import Machine, Prepared
from .interpreter.text import Kernel
from .sources import Source


def flat(signature, arguments):
    """The kernel's parameters as its signature lists them: bytes, or numbers as wide as the parameter."""
    for kind, value in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind == "constexpr":
            pass
        elif kind.startswith(("fp", "bf")):
            yield struct.pack({"fp64": "<d"}.get(kind, "<f"), value)
        else:
            yield value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0)


class Driver:
    """As much of a driver as the JIT asks for; it is its own `utils`."""

    def __init__(self, machine: Machine):
        self.machine, self.utils, self.text = machine, self, ""
        self.kernels: list[Kernel] = []
        triton.knobs.runtime.kernel_load_start_hook = self._take_text

    @property
    def device(self):
        return self.machine.devices[torch.cuda.current_device()]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.capability, 32)

    def get_current_device(self) -> int:
        return self.device.capability  # Triton keeps its kernels by device

    def get_current_stream(self, device: int) -> int:
        return torch.cuda.current_stream().cuda_stream

    def get_device_properties(self, device: int) -> dict:
        return {"max_shared_mem": self.device.shared_limit}

    def _take_text(self, module, function, name, files, hash) -> None:
        self.text = next(Path(path).read_text() for file, path in files.items() if file.endswith(".ptx"))

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        kernel = self.machine.kernel(Source(self.text), name)
        self.kernels.append(kernel)
        return None, kernel, 0, 0, kernel.max_threads

    def launcher_cls(self, src, metadata):
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        assert metadata.num_ctas == 1

        def launch(x, y, z, stream, kernel, packed, launch_metadata, enter, leave, *arguments):
            values = [*flat(src.signature.values(), arguments), 0, 0]  # no scratch
            data = bytearray(kernel.parameter_bytes)
            for (at, size), value in zip(kernel.parameters.values(), values, strict=True):
                raw = value if isinstance(value, bytes) else (value % (1 << 8 * size)).to_bytes(size, "little")
                assert len(raw) == size
                data[at : at + size] = raw
            threads, limit = metadata.num_warps * 32, self.device.shared_limit
            number = self.machine.prepare(
                Prepared(
                    kernel,
                    (x, y, z),
                    (threads, 1, 1),
                    (1, 1, 1),
                    metadata.shared,
                    limit,
                    bytes(data),
                    orders_shared=False,
                    device=torch.cuda.current_device(),
                )
            )
            if self.machine.runtime.fake_launch(ctypes.c_void_p(stream), number):
                raise self.machine.error

        return launch


def install(machine: Machine) -> Driver:
    """For the rest of the process."""
    made = Driver(machine)
    driver.set_active(made)
    return made
