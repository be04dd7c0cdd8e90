"""Integer arithmetic, PTX ISA §9.7.1."""

import numpy as np

from ..types import BYTES, UNSIGNED, PtxError, numpy_type, truncating_divide
from . import meaning


def ufunc(block, instruction, function, kind, second=None):
    """d = function(a, b)"""
    d, a, b = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, second or kind), block.writer(d, kind)
    return lambda mask: write(function(x, y), mask)


# §9.7.1.1 add, §9.7.1.2 sub: modulo 2^n
@meaning(r"(?P<name>add|sub)\.(?P<kind>[us](16|32|64))")
def add_sub(block, instruction, pc, name, kind):
    return ufunc(block, instruction, np.add if name == "add" else np.subtract, kind)


def wide(kind: str) -> str:
    return kind[0] + str(16 * BYTES[kind])


def high(x, y, kind: str):
    """The upper half of the product."""
    if BYTES[kind] == 8:
        product = np.asarray(x, object) * np.asarray(y, object)
        return (product >> 64).astype(object) & (2**64 - 1)
    double = numpy_type(wide(kind))
    product = np.asarray(x).astype(double) * np.asarray(y).astype(double)
    return (product >> double(8 * BYTES[kind])).astype(numpy_type(kind))


# §9.7.1.3 mul: .lo and .hi halves of the product, or all of it
@meaning(r"mul\.(?P<part>lo|hi|wide)\.(?P<kind>[us](16|32|64))")
def mul(block, instruction, pc, part, kind):
    d, a, b = instruction.operands
    x, y = block.source(a, kind), block.source(b, kind)
    if part == "lo":
        return ufunc(block, instruction, np.multiply, kind)
    if part == "hi":
        write = block.writer(d, kind)
        return lambda mask: write(np.array(high(x, y, kind)).astype(numpy_type(kind)), mask)
    double, write = numpy_type(wide(kind)), block.writer(d, wide(kind))
    return lambda mask: write(np.asarray(x).astype(double) * np.asarray(y).astype(double), mask)


# §9.7.1.4 mad: the same, and c added
@meaning(r"mad\.(?P<part>lo|hi|wide)\.(?P<kind>[us](16|32|64))")
def mad(block, instruction, pc, part, kind):
    d, a, b, c = instruction.operands
    x, y = block.source(a, kind), block.source(b, kind)
    if part == "wide":
        double = numpy_type(wide(kind))
        z, write = block.source(c, wide(kind)), block.writer(d, wide(kind))
        return lambda mask: write(np.asarray(x).astype(double) * np.asarray(y).astype(double) + z, mask)
    z, write = block.source(c, kind), block.writer(d, kind)
    if part == "lo":
        return lambda mask: write(np.add(np.multiply(x, y), z), mask)
    return lambda mask: write(np.add(high(x, y, kind), z), mask)


# §9.7.1.8 div, §9.7.1.9 rem
@meaning(r"(?P<name>div|rem)\.(?P<kind>[us](16|32|64))")
def div_rem(block, instruction, pc, name, kind):
    signed = kind[0] == "s"
    if name == "div":
        return ufunc(block, instruction, lambda x, y: truncating_divide(x, y, signed), kind)
    return ufunc(block, instruction, lambda x, y: np.subtract(x, np.multiply(truncating_divide(x, y, signed), y)), kind)


# §9.7.1.10 abs, §9.7.1.11 neg
@meaning(r"(?P<name>abs|neg)\.(?P<kind>s(16|32|64))")
def abs_neg(block, instruction, pc, name, kind):
    d, a = instruction.operands
    x, write, function = block.source(a, kind), block.writer(d, kind), np.abs if name == "abs" else np.negative
    return lambda mask: write(function(x), mask)


# §9.7.1.12 min, §9.7.1.13 max
@meaning(r"(?P<name>min|max)\.(?P<kind>[us](16|32|64))")
def min_max(block, instruction, pc, name, kind):
    return ufunc(block, instruction, np.minimum if name == "min" else np.maximum, kind)


# §9.7.1.14 popc, §9.7.1.15 clz: counts, always u32
@meaning(r"(?P<name>popc|clz)\.(?P<kind>b(32|64))")
def count(block, instruction, pc, name, kind):
    d, a = instruction.operands
    x, write, bits = block.source(a, kind), block.writer(d, "u32"), 8 * BYTES[kind]
    if name == "popc":
        return lambda mask: write(np.array([int(v).bit_count() for v in block.per_thread(x)], np.uint32), mask)
    return lambda mask: write(np.array([bits - int(v).bit_length() for v in block.per_thread(x)], np.uint32), mask)


# §9.7.1.19 bfe: `length` bits from `position` on; a signed field is extended by its top bit
@meaning(r"bfe\.(?P<kind>[us](32|64))")
def bfe(block, instruction, pc, kind):
    d, a, b, c = instruction.operands
    x, write, bits = block.source(a, kind), block.writer(d, kind), 8 * BYTES[kind]
    position, length = block.source(b, "u32"), block.source(c, "u32")
    big = numpy_type(kind)

    def run(mask):
        p, n = np.asarray(position) & 255, np.asarray(length) & 255
        if ((p + n > bits) | (n == 0))[...].any():
            raise PtxError(f"a field outside of the register: {instruction.text}")
        write((np.asarray(x) << (bits - p - n).astype(big)) >> (bits - n).astype(big), mask)

    return run


# §9.7.1.20 bfi: the low bits of a replace a field of b
@meaning(r"bfi\.(?P<kind>b(32|64))")
def bfi(block, instruction, pc, kind):
    d, a, b, c, length = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, kind), block.writer(d, kind)
    position, count = block.source(c, "u32"), block.source(length, "u32")
    if np.ndim(position) or np.ndim(count):
        raise PtxError(f"a field that differs between threads has no meaning here: {instruction.text}")
    word = UNSIGNED[BYTES[kind]]
    p, n = int(position) & 255, int(count) & 255
    field = word(((1 << n) - 1) << p & ((1 << 8 * BYTES[kind]) - 1))
    return lambda mask: write((y & ~field) | (np.left_shift(x, word(p)) & field), mask)
