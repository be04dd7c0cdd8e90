"""Compiles Triton kernels for GPUs that are not there, through the real launchers: what they pass is what gets specialized.

Within :func:`compiling_for` each kernel launch compiles the kernel for the given architecture, appends it to a list, and runs nothing;
tensors may be on the CPU.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tools.sass.listing import Instruction, parse

from ..ptx.forms import missing, opcodes

INTERPRETED = (80, 90)  # whose PTX tests/ptx/executed_triton.py runs
#: Shared memory that one block may use.
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps its kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[list[CompiledKernel]]:
    """Compile instead of launching; yields the list that the kernels are appended to. The PTX interpreter
    must know every form of the instructions that it executes."""
    kernels: list[CompiledKernel] = []
    run, active = JITFunction.run, driver._active

    def record(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    JITFunction.run = record
    driver.set_active(_Driver(arch))
    try:
        yield kernels
    finally:
        JITFunction.run, driver._active = run, active
    if arch in INTERPRETED:
        assert not missing(opcodes(kernel.asm["ptx"] for kernel in kernels))


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int  # bytes of local memory a thread: spilled registers
    shared: int  # bytes a block


def _cuobjdump(kernel: CompiledKernel, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_code(kernel: CompiledKernel) -> list[Instruction]:
    (code,) = parse(_cuobjdump(kernel, "-sass")).values()
    return list(code.values())


def usage(kernel: CompiledKernel) -> Usage:
    """Registers, stack and shared memory of the compiled kernel, read from its machine code."""
    text = _cuobjdump(kernel, "-res-usage")
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return Usage(registers, stack + local, kernel.metadata.shared)


def count(pattern: str, kernel: CompiledKernel) -> int:
    """Number of matches of a regular expression in the kernel's PTX."""
    return len(re.findall(pattern, kernel.asm["ptx"]))
