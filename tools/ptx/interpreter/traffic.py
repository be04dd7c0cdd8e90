"""Traffic of a kernel's accesses, counted where a test asks for it: sectors and lines of L2, and bank conflicts of shared memory.

Only schedule 0 keeps the lanes of a warp together; under another one the parts of a warp count as accesses of their own.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .text import Address, Instruction
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


def merged(code: list[Instruction]) -> dict[str, int]:
    """Bytes of the vectors that ptxas makes of neighbours in the text, by the text of the first; 0 for the others."""
    found: dict[str, int] = {}
    for key, run in itertools.groupby(code, _kind):
        left = [(i.text, next(o.offset for o in i.operands if isinstance(o, Address))) for i in run] if key else []
        while left:
            size, first = key[-1], left[0][1]
            count = next(
                n
                for n in (16 // size, 8 // size, 1)
                if n <= 1
                or (first % (n * size) == 0 and [at for _, at in left[:n]] == [*range(first, first + n * size, size)])
            )
            vector, left = left[: count or 1], left[count or 1 :]
            found |= {text: 0 for text, _ in vector} | {vector[0][0]: len(vector) * size}
    return found


def _kind(instruction: Instruction) -> tuple | None:
    """The common properties of a vector's parts: opcode, guard, base of the address, bytes."""
    form = re.fullmatch(r"(?:ld|st)\.(?!param)[\w.:]*?(?:\.v(\d))?\.[a-z]+(\d+)", instruction.op)
    address = next((o for o in instruction.operands if isinstance(o, Address)), None)
    if form is None or address is None:
        return None
    return instruction.op, instruction.guard, address.base, int(form[1] or 1) * int(form[2]) // 8


class Traffic:
    """Counts by kernel, kind and the instruction's text."""

    def __init__(self):
        self.counts: dict[tuple[str, str, str], Count] = {}
        self._merged: dict[str, dict[str, int]] = {}

    def access(self, block, kind: str, addresses, threads, total: int, text: str) -> None:
        """Notes accesses of threads to `total` bytes each."""
        kernel = block.kernel
        if kernel.name not in self._merged:
            self._merged[kernel.name] = merged(kernel.code)
        total = self._merged[kernel.name].get(text, total)
        if total and kind == "shared":
            self._note(block, kind, text, _in_shared(addresses, threads, total))
        elif total:
            self._note(block, kind, text, _in_global(addresses, threads // WARP, total))

    def box(self, block, kind: str, map_, coordinates, text: str) -> None:
        """Notes a box of TMA, whose rows do not share sectors."""
        offsets, inside = map_.global_places(coordinates)
        rows = np.arange(offsets.size) // map_.box[0]
        self._note(block, kind, text, _in_global(map_.base + offsets[inside], rows[inside], map_.element))

    def _note(self, block, kind: str, text: str, count: Count) -> None:
        self.counts.setdefault((block.kernel.name, kind, text), Count()).add(count)

    def of(self, kernel: str, kind: str, op: str = "") -> Count:
        """The sum over the instructions of kernels whose names have that text, whose texts have `op`."""
        total = Count()
        for (name, of_kind, text), count in self.counts.items():
            if kernel in name and kind == of_kind and op in text:
                total.add(count)
        return total


def _in_shared(addresses, threads, total: int) -> Count:
    """A warp's 8-byte accesses take two turns, its 16-byte accesses four, as ldmatrix does for four matrices (CUDA C++ Programming Guide,
    "Shared Memory"). In a turn, each wavefront takes one word of every bank."""
    turn = (threads // min(WARP, BANKS * WORD // total)).astype(np.int64)
    words = (addresses[:, None] // WORD + np.arange(max(1, total // WORD), dtype=np.uint64)).astype(np.int64)
    once = np.unique(turn[:, None] << 32 | words)
    turns, turn = np.unique(once >> 32, return_inverse=True)
    of_bank = np.zeros((len(turns), BANKS), np.int64)
    np.add.at(of_bank, (turn, once % BANKS), 1)
    wavefronts = int(of_bank.max(1).sum())
    return Count(len(np.unique(threads // WARP)), wavefronts=wavefronts, conflicts=wavefronts - len(turns))


def _in_global(addresses, group, size: int) -> Count:
    """Accesses of one group, a warp or a row of a box, meet in sectors and lines."""
    at, group = addresses.astype(np.int64), group.astype(np.int64) << 48
    parts = {unit: len(np.unique(group | at // unit)) for unit in (size, SECTOR, LINE)}
    return Count(len(np.unique(group)), size * parts[size], parts[SECTOR], parts[LINE])


@contextlib.contextmanager
def counted(device) -> Iterator[Traffic]:
    """Counts the accesses of the launches on an interpreter's device."""
    device.traffic = found = Traffic()
    try:
        yield found
    finally:
        device.traffic = None
