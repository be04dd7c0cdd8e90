"""Which instructions the CPU kernels of 16-bit products use, and how wide the vectors of those of rows are at most
(csrc/base/cpu/isa.h)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import load
from .library import LIBRARY

LIBRARY.define("cpu_isa(str? request=None) -> str[]")
LIBRARY.define("cpu_peak(ScalarType dtype, float seconds) -> float")


def _cpu_isa(request: str | None = None) -> list[str]:
    if "cpu" in load.absent():
        return ["portable", "portable"]
    return torch.ops.amp_kernels.cpu_isa(request)


def chosen() -> str:
    """The instruction set of the next product: the one that the environment variable ``AMP_KERNELS_CPU_ISA`` names, else
    ``"portable"`` while ``torch.use_deterministic_algorithms(True)`` holds, else the best one of :func:`available`.

    Raises:
        RuntimeError: the variable names what this machine does not have; the message says what it has.
    """
    return _cpu_isa()[0]


def available() -> list[str]:
    """Values of ``AMP_KERNELS_CPU_ISA`` that this machine accepts, among ``"portable"``, ``"avx2"``, ``"avx512"``,
    ``"avx512_bf16"``, ``"amx"`` and ``"amx_emulated"``."""
    return _cpu_isa()[1:]


_forced = ""


@contextlib.contextmanager
def cpu_isa(name: str) -> Iterator[None]:
    """Within the block, in any thread, products use the instruction set ``name``; for tests and comparisons.

    Raises:
        RuntimeError: ``name`` is none of :func:`available`.
    """
    global _forced
    _cpu_isa(name)
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous
        _cpu_isa(_forced)


def flushes_subnormals() -> bool:
    """True if the next bf16 product takes subnormal numbers for zero (docs/cpu.md)."""
    return chosen() in ("avx512_bf16", "amx", "amx_emulated")


def peak(dtype: torch.dtype, seconds: float) -> float:
    """Flops a second of the instructions that multiply in :func:`chosen`, reading registers alone, on torch's threads:
    what no product of 16-bit ``dtype`` can exceed. 0 where that is ``"portable"``."""
    return 0.0 if "cpu" in load.absent() else torch.ops.amp_kernels.cpu_peak(dtype, seconds)
