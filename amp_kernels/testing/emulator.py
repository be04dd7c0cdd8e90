"""The launches of the emulator (``csrc/emulator``) in the last call of an op."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .._dispatch import load


@dataclass(frozen=True)
class Launch:
    """One kernel launch; sizes in blocks, threads, blocks, bytes and bytes."""

    name: str
    grid: int
    block: int
    cluster: int
    shared: int
    arguments: int


def launches() -> list[Launch]:
    """The launches of the last op on backend ``emulate``, in order."""
    library = ctypes.CDLL(str(load.PACKAGE / "libamp_kernels_emulated.so"))
    library.ak_emulator_launches.restype = ctypes.c_char_p
    lines = library.ak_emulator_launches().decode().splitlines()
    return [Launch(name, *map(int, sizes[1::2])) for name, *sizes in (line.rsplit(" ", 10) for line in lines)]
