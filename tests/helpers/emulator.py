"""The launches of the emulator (``tools/emulator``) in the last call of an op."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from amp_kernels._dispatch import load


@dataclass(frozen=True)
class Launch:
    """One kernel launch; sizes in blocks, threads, blocks, bytes and bytes.

    `overlaps`: it may start before the previous kernel ends. `half_sectors`: parts of 32-byte sectors that a warp stored
    without the rest, in memory that the kernel did not read; 0 unless AMP_KERNELS_EMULATE_SECTORS is set.
    """

    name: str
    grid: int
    block: int
    cluster: int
    shared: int
    arguments: int
    overlaps: bool
    half_sectors: int


def launches() -> list[Launch]:
    """The launches of the last op on backend ``emulate``, in order."""
    library = ctypes.CDLL(str(load.PACKAGE / "libamp_kernels_emulated.so"))
    library.ak_emulator_launches.restype = ctypes.c_char_p
    lines = library.ak_emulator_launches().decode().splitlines()
    found = []
    for name, *fields in (line.rsplit(" ", 14) for line in lines):
        *sizes, overlaps, halves = map(int, fields[1::2])
        found.append(Launch(name, *sizes, bool(overlaps), halves))
    return found
