"""The steady state of the Hopper GEMM's consumers: the innermost loop with products in it, read from the machine code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .listing import Instruction

# Memory accesses, waits and calls have no place between two steps of k.
FOREIGN = ("STL", "LDL", "LDG", "STG", "LD", "ST", "LDS", "STS", "MEMBAR", "ERRBAR", "FENCE", "BAR", "CALL")


@dataclass(frozen=True)
class Loop:
    code: Sequence[Instruction]

    def count(self, *names: str) -> int:
        return sum(x.name in names for x in self.code)

    @property
    def products(self) -> list[Instruction]:
        return [x for x in self.code if x.name == "HGMMA"]

    @property
    def waits(self) -> list[Instruction]:
        return [x for x in self.code if x.name == "WARPGROUP" and "DEPBAR" in x.modifiers]

    @property
    def stall(self) -> int:
        """Cycles in which the warp issues nothing or is at an instruction, if it waits for nobody."""
        return sum(x.stall for x in self.code)


def main_loop(code: Sequence[Instruction]) -> Loop:
    back = [(int(x.operands[-1], 16), x.address) for x in code if x.name == "BRA"]
    loops = [Loop([x for x in code if begin <= x.address <= end]) for begin, end in back if begin <= end]
    return min((loop for loop in loops if loop.products), key=lambda loop: len(loop.code))


def faults(code: Sequence[Instruction], columns: int, slices: int) -> list[str]:
    """Faults of a tile's loop. ``slices``: those of 64 rows that a consumer has; ``columns`` of the tile."""
    loop = main_loop(code)
    steps, rest = divmod(len(loop.products), 4 * slices)
    if rest or not steps:
        return [f"{len(loop.products)} products, which is no number of steps of {4 * slices}"]
    found = []

    def check(right: bool, what: str) -> None:
        if not right:
            found.append(what)

    shape = f"64x{columns}x16"
    check(all(x.modifiers[0] == shape for x in loop.products), f"products that are not {shape}")
    check(
        [x.operands for x in loop.waits] == [("gsb0", "0x1")] * steps,
        f"waits {[x.operands for x in loop.waits]}: each step waits once, for all products but its own",
    )
    arrivals = sum(x.name == "WARPGROUP" and "ARRIVE" in x.modifiers for x in loop.code)
    check(arrivals == steps, f"{arrivals} starts of a step in {steps} steps")
    foreign = [x.name for x in loop.code if x.name in FOREIGN]
    check(not foreign, f"{foreign} in the loop")
    moves = loop.count("R2UR") / len(loop.products)
    check(moves <= MOVES, f"{moves} moves to uniform registers a product, at most {MOVES} are allowed")
    instructions, stall = len(loop.code) / steps, loop.stall / steps
    allowed = INSTRUCTIONS + INSTRUCTIONS_OF_A_SLICE * (slices - 1)
    check(instructions <= allowed, f"{instructions} instructions a step, {allowed} are allowed")
    allowed = STALL + STALL_OF_A_SLICE * (slices - 1)
    check(stall <= allowed, f"{stall} cycles of stalls a step, {allowed} are allowed")
    return found


# The prototype that reached 0.97 of cuBLAS: 85.5 instructions and 180 cycles of stalls a step, 2 moves a product. Here
# a step moves two addresses, and its descriptors follow from them in uniform registers. The most have tiles of 128 x 64 with
# pingpong, 63.5 in two slices, whose products take 256 cycles.
INSTRUCTIONS, INSTRUCTIONS_OF_A_SLICE = 54, 10
STALL, STALL_OF_A_SLICE = 170, 15
MOVES = 0.5
