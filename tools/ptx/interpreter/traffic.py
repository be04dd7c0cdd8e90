"""Traffic of a kernel's accesses, counted where a test asks for it: sectors and lines of L2, and bank conflicts of shared memory.

Only schedule 0 keeps the lanes of a warp together; under another one the parts of a warp count as accesses of their own.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .types import WARP

WORD, BANKS = 4, 32
SECTOR, LINE = 32, 128  # bytes that L2 sends at least, and that it keeps under one tag
KINDS = ("shared", "loads", "stores", "boxes in", "boxes out")  # shared memory; global memory by warps; by TMA


@dataclass
class Count:
    """Accesses of warps, or rows of TMA's boxes."""

    accesses: int = 0
    used: int = 0  # bytes of global memory, each counted once in an access
    sectors: int = 0
    lines: int = 0
    wavefronts: int = 0  # of shared memory: turns, in each of which a bank gives one word
    conflicts: int = 0  # wavefronts beyond one for each 128 bytes that a warp may ask for

    @property
    def waste(self) -> float:
        """Bytes of the sectors over the bytes used."""
        return SECTOR * self.sectors / max(self.used, 1)

    def add(self, other: "Count") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Traffic:
    """Counts by kernel, kind and the instruction's text."""

    def __init__(self):
        self.counts: dict[tuple[str, str, str], Count] = {}

    def note(self, block, kind: str, text: str, count: Count) -> None:
        self.counts.setdefault((block.kernel.name, kind, text), Count()).add(count)

    def shared(self, block, addresses, threads, total: int, text: str) -> None:
        """Accesses of threads to `total` bytes each. A warp's 8-byte accesses take two turns, its 16-byte accesses four, and so does
        ldmatrix for four matrices (CUDA C++ Programming Guide, "Shared Memory")."""
        turn = threads.astype(np.int64) // min(WARP, BANKS * WORD // total)
        words = addresses[:, None] // WORD + np.arange(max(1, total // WORD), dtype=np.uint64)
        once = np.unique(
            np.stack([np.broadcast_to(turn[:, None], words.shape), words.astype(np.int64)], -1).reshape(-1, 2), axis=0
        )
        turns, turn = np.unique(once[:, 0], return_inverse=True)
        of_bank = np.zeros((len(turns), BANKS), np.int64)
        np.add.at(of_bank, (turn, once[:, 1] % BANKS), 1)
        wavefronts = int(of_bank.max(1).sum())
        accesses = len(np.unique(threads // WARP))
        self.note(block, "shared", text, Count(accesses, wavefronts=wavefronts, conflicts=wavefronts - len(turns)))

    def device(self, block, kind: str, addresses, group, total: int, text: str) -> None:
        """Accesses to `total` bytes of global memory each. Those of a group, a warp or a row of a box, meet in sectors and lines."""
        bytes_of = lambda unit: len(np.unique(np.stack([group, addresses.astype(np.int64) // unit]), axis=1).T)  # noqa: E731
        count = Count(len(np.unique(group)), total * bytes_of(total), bytes_of(SECTOR), bytes_of(LINE))
        self.note(block, kind, text, count)

    def box(self, block, kind: str, map_, coordinates, text: str) -> None:
        offsets, inside = map_.global_places(coordinates)
        rows = np.arange(offsets.size) // map_.box[0]
        if inside.any():
            self.device(block, kind, map_.base + offsets[inside], rows[inside], map_.element, text)

    def of(self, kernel: str, kind: str, op: str = "") -> Count:
        """The sum over the instructions of kernels whose names have that text, whose texts have `op`."""
        total = Count()
        for (name, of_kind, text), count in self.counts.items():
            if kernel in name and kind == of_kind and op in text:
                total.add(count)
        return total


@contextlib.contextmanager
def counted(device) -> Iterator[Traffic]:
    """Counts the accesses of the launches on an interpreter's device."""
    device.traffic = found = Traffic()
    try:
        yield found
    finally:
        device.traffic = None
