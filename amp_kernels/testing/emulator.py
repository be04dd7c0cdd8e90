"""The launches of the emulator (``csrc/emulator``) in the last call of an op."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .._dispatch import load


@dataclass(frozen=True)
class Launch:
    """One kernel launch; sizes in blocks, threads, blocks, bytes and bytes. `overlaps`: it may start before the previous kernel ends."""

    name: str
    grid: int
    block: int
    cluster: int
    shared: int
    arguments: int
    overlaps: bool


def launches() -> list[Launch]:
    """The launches of the last op on backend ``emulate``, in order."""
    library = ctypes.CDLL(str(load.PACKAGE / "libamp_kernels_emulated.so"))
    library.ak_emulator_launches.restype = ctypes.c_char_p
    lines = library.ak_emulator_launches().decode().splitlines()
    words = (line.rsplit(" ", 12) for line in lines)
    return [Launch(name, *map(int, fields[1:-1:2]), fields[-1] == "1") for name, *fields in words]
