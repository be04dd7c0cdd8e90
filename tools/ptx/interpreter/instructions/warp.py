"""Instructions of whole warps: PTX ISA §9.7.9.6 (shfl), §9.7.13 (vote, redux, elect, bar.warp), §9.7.19.5 (setmaxnreg)."""

import numpy as np

from ..text import Pair
from ..types import GONE, WARP, WARPGROUP, PtxError, numpy_type
from . import meaning, uniform

ALL = 0xFFFFFFFF


def whole_warp(block, instruction, pc, members=None) -> bool:
    """Gathers the lanes. Only member masks of all lanes have a user."""
    if members is not None:
        values = block.per_thread(members)[block.mask]
        if (values != ALL).any():
            raise PtxError(
                f"a member mask of {int(values[values != ALL][0]):#x}; only whole warps are modelled: {instruction.text}"
            )
    return block.gather(instruction, pc)


# §9.7.9.6 shfl.sync: from another lane; c holds the clamp (low 5 bits) and the mask of segments (bits 8 to 12)
@meaning(r"shfl\.sync\.(?P<mode>up|down|bfly|idx)\.b32")
def shfl(block, instruction, pc, mode):
    d, a, b, c, members = instruction.operands
    where, valid = (d.first, block.writer(d.second, "pred")) if isinstance(d, Pair) else (d, None)
    x, distance, packed = block.source(a, "b32"), block.source(b, "u32"), block.source(c, "u32")
    write, member_mask = block.writer(where, "b32"), block.source(members, "b32")
    lane = block.lane.astype(np.int64)

    def run(mask):
        if not whole_warp(block, instruction, pc, member_mask):
            return GONE
        n = np.asarray(distance).astype(np.int64) & 31
        clamp, segment = np.asarray(packed).astype(np.int64) & 31, (np.asarray(packed).astype(np.int64) >> 8) & 31
        highest = (lane & segment) | (clamp & ~segment)
        lowest = lane & segment
        other = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": lowest | (n & ~segment)}[mode]
        inside = other >= highest if mode == "up" else other <= highest
        other = np.where(inside, other, lane)
        rows = block.per_thread(x).reshape(-1, WARP)
        write(np.take_along_axis(rows, other.reshape(-1, WARP), 1).reshape(-1), mask)
        if valid:
            valid(inside, mask)

    return run


# §9.7.13.9 vote.sync
@meaning(r"vote\.sync\.(?P<mode>ballot\.b32|(all|any|uni)\.pred)")
def vote(block, instruction, pc, mode):
    d, a, members = instruction.operands
    x, member_mask = block.source(a, "pred"), block.source(members, "b32")
    negated = getattr(a, "negated", False)
    write = block.writer(d, mode.split(".")[1])

    def run(mask):
        if not whole_warp(block, instruction, pc, member_mask):
            return GONE
        votes = block.per_thread(block.source(a, "pred") if negated else x).reshape(-1, WARP)
        if mode == "ballot.b32":
            result = (votes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            result = {"all": votes.all(1), "any": votes.any(1), "uni": votes.all(1) | ~votes.any(1)}[mode.split(".")[0]]
        write(np.repeat(result, WARP), mask)

    return run


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


# §9.7.13.12 redux.sync: over the lanes
@meaning(r"redux\.sync\.(?P<name>add|min|max|and|or|xor)\.(?P<kind>[bus]32)")
def redux(block, instruction, pc, name, kind):
    d, a, members = instruction.operands
    x, write, member_mask = block.source(a, kind), block.writer(d, kind), block.source(members, "b32")
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]

    def run(mask):
        if not whole_warp(block, instruction, pc, member_mask):
            return GONE
        rows = block.per_thread(x).reshape(-1, WARP)
        write(np.repeat(function.reduce(rows, axis=1).astype(numpy_type(kind)), WARP), mask)

    return run


# §9.7.13.15 elect.sync: one lane, here the lowest
@meaning(r"elect\.sync")
def elect(block, instruction, pc):
    d, members = instruction.operands
    who = block.writer(d.first, "b32")
    chosen = block.writer(d.second, "pred")
    member_mask = block.source(members, "b32")

    def run(mask):
        if not whole_warp(block, instruction, pc, member_mask):
            return GONE
        who(np.uint32(0), mask)
        chosen(block.lane == 0, mask)

    return run


# §9.7.13.2 bar.warp.sync: the lanes meet
@meaning(r"bar\.warp\.sync")
def warp_sync(block, instruction, pc):
    members = block.source(instruction.operands[0], "b32")
    return lambda mask: None if whole_warp(block, instruction, pc, members) else GONE


# §9.7.19.5 setmaxnreg: a multiple of 8 in 24 to 256, by whole warpgroups
@meaning(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def setmaxnreg(block, instruction, pc):
    def run(mask):
        if not block.gather(instruction, pc, WARPGROUP):
            return GONE
        count = uniform(block, block.source(instruction.operands[0], "u32"), instruction.text)
        if count % 8 or not 24 <= count <= 256:
            raise PtxError(f"{count} registers; accepted: multiples of 8 from 24 to 256: {instruction.text}")

    return run
