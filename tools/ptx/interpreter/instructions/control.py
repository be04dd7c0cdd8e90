"""Control flow, PTX ISA §9.7.12, and hints."""

from ..types import GONE
from . import meaning, nothing


# §9.7.12.3 bra
@meaning(r"bra(?P<uni>\.uni)?")
def bra(block, instruction, pc, uni):
    target = block.kernel.labels[instruction.operands[0].name]
    if instruction.guard is None:
        return lambda mask: target
    guard, negated = block.register(instruction.guard.name), instruction.guard.negated

    def run(mask):
        taken = block.mask & (~guard if negated else guard)
        if not taken.any():
            return None
        rest = block.mask & ~taken
        if not rest.any():
            return target
        block.join(target, taken)
        block.join(pc + 1, rest)
        return GONE

    return run


# §9.7.12.6 ret of a kernel, §9.7.12.7 exit. Bulk copies that were committed complete on their own
@meaning(r"ret|exit")
def ret(block, instruction, pc):
    def run(mask):
        block.live = block.live & ~block.mask
        if block.done():
            block.check_end()
        return GONE

    return run


# hints: §9.7.9.16 prefetch (of tensor maps), §9.7.19.5 setmaxnreg is in warp.py
meaning(r"prefetch\.tensormap|prefetch(u)?\.L[12]|(discard|applypriority)\.global\.L2.*")(nothing)
