"""Logic and shifts, PTX ISA §9.7.8."""

import numpy as np

from ..types import BYTES, numpy_type
from . import meaning

BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


# §9.7.8.1 and, §9.7.8.2 or, §9.7.8.3 xor. Predicates are bits too
@meaning(r"(?P<name>and|or|xor)\.(?P<kind>b(16|32|64)|pred)")
def bitwise(block, instruction, pc, name, kind):
    d, a, b = instruction.operands
    x, y, write, function = block.source(a, kind), block.source(b, kind), block.writer(d, kind), BITWISE[name]
    if kind == "pred" and (getattr(a, "negated", False) or getattr(b, "negated", False)):
        return lambda mask: write(function(block.source(a, kind), block.source(b, kind)), mask)
    return lambda mask: write(function(x, y), mask)


# §9.7.8.4 not
@meaning(r"not\.(?P<kind>b(16|32|64)|pred)")
def invert(block, instruction, pc, kind):
    d, a = instruction.operands
    x, write = block.source(a, kind), block.writer(d, kind)
    return lambda mask: write(np.invert(x), mask)


# §9.7.8.8 shl, §9.7.8.9 shr: amounts above the width give 0, or the sign
@meaning(r"(?P<name>shl|shr)\.(?P<kind>[bus](16|32|64))")
def shift(block, instruction, pc, name, kind):
    d, a, b = instruction.operands
    x, amount, write = block.source(a, kind), block.source(b, "u32"), block.writer(d, kind)
    bits, word = 8 * BYTES[kind], numpy_type(kind)
    function = np.left_shift if name == "shl" else np.right_shift
    arithmetic = name == "shr" and kind[0] == "s"

    def run(mask):
        n = np.minimum(amount, bits - 1).astype(word)
        result = function(x, n)
        write(result if arithmetic else np.where(np.asarray(amount) < bits, result, word(0)), mask)

    return run


# §9.7.8.7 shf: the upper (l) or lower (r) word of {b, a} shifted
@meaning(r"shf\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32")
def funnel(block, instruction, pc, side, mode):
    d, a, b, c = instruction.operands
    low, high, amount = block.source(a, "b32"), block.source(b, "b32"), block.source(c, "u32")
    write = block.writer(d, "b32")

    def run(mask):
        n = np.asarray(amount) & 31 if mode == "wrap" else np.minimum(amount, 32)
        n = n.astype(np.uint64)
        both = (block.per_thread(high).astype(np.uint64) << np.uint64(32)) | block.per_thread(low)
        write(((both << n) >> np.uint64(32) if side == "l" else both >> n).astype(np.uint32), mask)

    return run


# §9.7.8.6 lop3: a table of 8 bits over three inputs
@meaning(r"lop3\.b32")
def lop3(block, instruction, pc):
    d, *inputs, table = instruction.operands
    x, y, z = (block.source(operand, "b32") for operand in inputs)
    bits, write = int(block.source(table, "u32")), block.writer(d, "b32")

    def run(mask):
        result = np.zeros(block.size, np.uint32)
        for row in range(8):
            if bits >> row & 1:
                terms = [v if row >> place & 1 else ~np.asarray(v) for v, place in ((x, 2), (y, 1), (z, 0))]
                result |= terms[0] & terms[1] & terms[2]
        write(result, mask)

    return run
