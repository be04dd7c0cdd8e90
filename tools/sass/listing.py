"""Instructions of the machine code (SASS) that `cuobjdump` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPERAND = re.compile(r",(?![^\[]*\])")  # a comma that is not inside brackets
# The encoding stands beside an instruction and below it; before it, for sm_120, what the tool says of its scheduling.
LISTED = re.compile(
    r"^\s*arch = (?P<arch>\w+)|^\s*Function : (?P<function>\S+)"
    r"|^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+) )?\s*(?P<opcode>[^\s;]+)\s*(?P<operands>.*?)"
    r"(?:\s+[&?]\S+)*\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # "", or a predicate
    name: str  # without its modifiers
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    stall: int  # cycles until the warp's next instruction, at least


def listed(listing: str) -> Iterator[tuple[str, str, list[re.Match]]]:
    """(symbol, architecture, instructions) of the functions in what `cuobjdump -sass` prints."""
    symbol, arch, code = "", "", []
    for x in LISTED.finditer(listing):
        if x["address"]:
            code.append(x)
            continue
        if code:
            yield symbol, arch, code
            code = []
        symbol, arch = x["function"] or "", x["arch"] or arch
    if code:
        yield symbol, arch, code


def instruction(x: re.Match) -> Instruction:
    name, *modifiers = x["opcode"].split(".")
    operands = tuple(o.strip().replace(".reuse", "") for o in OPERAND.split(x["operands"]) if o)
    stall = int(x["control"], 16) >> 41 & 15
    return Instruction(int(x["address"], 16), x["guard"] or "", name, tuple(modifiers), operands, stall)


def parse(listing: str) -> dict[str, dict[int, Instruction]]:
    """The functions of one architecture, by name and address."""
    parsed = ((symbol, map(instruction, code)) for symbol, _, code in listed(listing))
    return {symbol: {x.address: x for x in code} for symbol, code in parsed}


def branch_tables(listing: str) -> dict[str, list[int]]:
    """The words of each function's second constant bank in what `cuobjdump -elf` prints."""
    tables: dict[str, list[int]] = {}
    words: list[int] | None = None
    for line in listing.splitlines():
        if match := re.match(r"\.nv\.constant2\.(\S+)", line):
            words = tables[match[1]] = []
        elif words is not None and re.match(r"\s*0x[0-9a-f]{8}", line):
            words += [int(word, 16) for word in line.split()]
        elif words:
            words = None
    return tables
