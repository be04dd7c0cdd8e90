"""Floating point, PTX ISA §9.7.3 (f32 and f64) and §9.7.4 (16 bits). Results are rounded to nearest even as .rn says; subnormals are kept
but where .ftz says that they become zeros of their sign."""

import numpy as np

from ..types import fma_f32, fma_f64, from_f16, numpy_type, to_f16
from . import meaning


# §9.7.3.3 add, §9.7.3.4 sub, §9.7.3.5 mul. Without .rn the compiler could contract; the value is the same
@meaning(r"(?P<name>add|sub|mul)(\.rn)?\.(?P<kind>f32|f64)")
def add_sub_mul(block, instruction, pc, name, kind):
    d, a, b = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, kind), block.writer(d, kind)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    return lambda mask: write(function(x, y), mask)


# §9.7.4.1 add, §9.7.4.2 sub, §9.7.4.3 mul. fp32 has more than twice the bits, so that its rounding before the last one changes nothing
@meaning(r"(?P<name>add|sub|mul)(\.rn)?\.(?P<kind>f16|f16x2)")
def half_add_sub_mul(block, instruction, pc, name, kind):
    d, a, b = instruction.operands
    bits = "b16" if kind == "f16" else "b32"
    x, y, write = block.source(a, bits), block.source(b, bits), block.writer(d, bits)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]

    def halves(shift):
        one, other = (from_f16((np.asarray(v) >> shift).astype(np.uint16)) for v in (x, y))
        return to_f16(function(one, other)).astype(numpy_type(bits)) << shift

    return lambda mask: write(halves(0) | halves(16) if kind == "f16x2" else halves(0), mask)


SMALLEST = np.float32(2.0**-126)


def flushed(x):
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


@meaning(r"fma\.rz\.f32")
def fma_to_zero(block, instruction, pc):
    d, a, b, c = instruction.operands
    x, y, z = (block.source(operand, "f32") for operand in (a, b, c))
    write = block.writer(d, "f32")
    return lambda mask: write(fma_f32(x, y, z, to_zero=True), mask)


# §9.7.3.6 fma: one rounding
@meaning(r"fma\.rn(?P<ftz>\.ftz)?\.(?P<kind>f32|f64)")
def fma(block, instruction, pc, ftz, kind):
    d, a, b, c = instruction.operands
    x, y, z = (block.source(operand, kind) for operand in (a, b, c))
    write = block.writer(d, kind)
    if kind == "f64":
        return lambda mask: write(fma_f64(x, y, z), mask)
    if ftz:
        return lambda mask: write(flushed(fma_f32(flushed(x), flushed(y), flushed(z))), mask)
    return lambda mask: write(fma_f32(x, y, z), mask)


# §9.7.3.8 div.rn, correctly rounded. div.full has 2 ulp, which a correctly rounded quotient is within
@meaning(r"div\.(rn|full)\.(?P<kind>f32|f64)")
def div(block, instruction, pc, kind):
    d, a, b = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, kind), block.writer(d, kind)
    return lambda mask: write(np.divide(x, y), mask)


SIGN = {"f16": ("b16", 0x8000), "f16x2": ("b32", 0x80008000), "f32": ("b32", 1 << 31), "f64": ("b64", 1 << 63)}


# §9.7.3.9 abs, §9.7.3.10 neg, §9.7.4.6, §9.7.4.5: the sign alone, of NaN too
@meaning(r"(?P<name>abs|neg)\.b?(?P<of>f16|f16x2|f32|f64)")
def abs_neg(block, instruction, pc, name, of):
    d, a = instruction.operands
    kind, bit = SIGN[of]
    x, write = block.source(a, kind), block.writer(d, kind)
    sign = numpy_type(kind)(bit)
    return (lambda mask: write(x & ~sign, mask)) if name == "abs" else (lambda mask: write(x ^ sign, mask))


# §9.7.3.11 min, §9.7.3.12 max: a NaN loses; with .NaN it wins; +0 is above -0
@meaning(r"(?P<name>min|max)(?P<nan>\.NaN)?\.(?P<kind>f32|f64)")
def min_max(block, instruction, pc, name, nan, kind):
    d, a, b = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, kind), block.writer(d, kind)
    lesser = name == "min"
    function = (np.minimum if lesser else np.maximum) if nan else (np.fmin if lesser else np.fmax)

    def run(mask):
        result = function(x, y)
        zeros = (np.asarray(x) == 0) & (np.asarray(y) == 0)
        either, both = np.signbit(x) | np.signbit(y), np.signbit(x) & np.signbit(y)
        zero = np.where(either if lesser else both, -0.0, 0.0)
        write(np.where(zeros, zero, result).astype(numpy_type(kind)), mask)

    return run


# §9.7.3.13 rcp.rn, §9.7.3.15 sqrt.rn
@meaning(r"(?P<name>rcp|sqrt)\.rn\.(?P<kind>f32|f64)")
def rcp_sqrt(block, instruction, pc, name, kind):
    d, a = instruction.operands
    x, write, one = block.source(a, kind), block.writer(d, kind), numpy_type(kind)(1)
    return (lambda mask: write(np.divide(one, x), mask)) if name == "rcp" else (lambda mask: write(np.sqrt(x), mask))


# §9.7.3.21 ex2.approx, §9.7.3.20 lg2.approx, §9.7.3.22 tanh.approx, §9.7.3.16 rsqrt.approx, approximations of 2 ulp or so: here the
# rounded exact value, which no test may compare bit for bit
@meaning(r"(?P<name>ex2|lg2|rsqrt|tanh|rcp|sqrt)\.approx(?P<ftz>\.ftz)?\.f32")
def approximations(block, instruction, pc, name, ftz):
    d, a = instruction.operands
    x, write = block.source(a, "f32"), block.writer(d, "f32")
    exact = {"ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda v: 1 / np.sqrt(v), "tanh": np.tanh}
    exact |= {"rcp": lambda v: 1 / v, "sqrt": np.sqrt}

    def run(mask):
        value = np.asarray(x, np.float64)
        result = exact[name](flushed(value) if ftz else value).astype(np.float32)
        write(flushed(result) if ftz else result, mask)

    return run
