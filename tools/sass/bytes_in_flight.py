"""Bytes that a thread asks of global memory before it waits for the first answer, and stores that fill sectors: read
from the order of the machine code.

Bandwidth takes bytes in flight (Little's law): those of a thread, times the threads that share a multiprocessor. And it
takes stores of whole sectors: memory is read to complete one that leaves the L2 cache when half of it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .listing import Instruction

REGISTER = re.compile(r"(?<![\w.])R\d+")
NO_RESULT = ("ST", "RED", "BRX", "BAR")  # their first operand is read
ENDS = {"EXIT", "RET", "BRX", "BRA"}


ADDRESS = re.compile(r"\[([^\[]*?)(?:\+(-?0x[0-9a-f]+))?\]$")  # base and offset


def size(load: Instruction) -> int:
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((widths[m] for m in load.modifiers if m in widths), 4)


def reads(x: Instruction) -> set[str]:
    """The first of the registers of every operand that is read."""
    result = bool(x.operands) and x.operands[0].startswith("R") and not x.name.startswith(NO_RESULT)
    return {register for operand in x.operands[result:] for register in REGISTER.findall(operand)}


def leaves(x: Instruction) -> bool:
    """True if what stands below is another path: after a jump that is always taken, and after a loop."""
    if x.name == "BRA" and int(x.operands[-1], 16) <= x.address:
        return True
    return x.name.startswith("CALL") or (x.name in ENDS and not x.guard and len(x.operands) <= 1)


def rounds(code: Iterable[Instruction]) -> list[int]:
    """Bytes on their way to a thread when it waits, for each time it waits. Loads into the same registers are one of two
    ways, of which the last counts."""
    found: list[int] = []
    pending: dict[str, int] = {}
    for x in code:
        if pending and (leaves(x) or not pending.keys().isdisjoint(reads(x))):
            found.append(sum(pending.values()))
            pending = {}
        if x.name == "LDG":
            first = int(x.operands[0][1:])
            for i in range(size(x) // 4):
                pending.pop(f"R{first + i}", None)
            pending[x.operands[0]] = size(x)
    return found


def halves(code: Iterable[Instruction]) -> list[str]:
    """The stores of 16 bytes that another one completes to 32: two halves of a sector, one after the other."""
    stored = set()
    for x in code:
        if x.name == "STG" and "128" in x.modifiers:
            base, offset = ADDRESS.search(x.operands[0]).groups()
            stored.add((base, int(offset or "0", 16)))
    return sorted(f"{base}+{offset:#x}" for base, offset in stored if (base, offset + 16) in stored)
