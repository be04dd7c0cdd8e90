"""csrc/base/split_master.h for Triton: an fp32 weight as a 16-bit weight and a 16-bit remainder, bit for bit the same.

All of it is arithmetic on the bits, in unsigned 32-bit integers that wrap around.
"""

import triton
import triton.language as tl

from ._rounding import wide_code


@triton.jit
def split_master(x, HALF: tl.constexpr):
    """The bits of the weight, ``x`` rounded half away from zero to ``HALF``, and of the remainder; both int16."""
    code = wide_code(x, HALF)
    # A NaN is not rounded: the carry could run into the sign.
    weight = tl.where(x != x, code, code + 0x8000) >> 16
    return weight.to(tl.uint16).to(tl.int16, bitcast=True), code.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def split_master24(x, random8, HALF: tl.constexpr):
    """The same of ``x`` rounded to 24 bits with 8 random bits; the remainder is int8."""
    code = wide_code(x, HALF) + tl.where(x != x, 0, random8)
    weight = tl.where(x != x, code, (code & 0xFFFFFF00) + 0x8000) >> 16
    return weight.to(tl.uint16).to(tl.int16, bitcast=True), (code >> 8).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def join_master(weight, remainder, HALF: tl.constexpr):
    """The fp32 weight of two tensors as ``split_master`` or ``split_master24`` makes them."""
    upper = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    signed = remainder.to(tl.int32) * (256 if remainder.dtype == tl.int8 else 1)
    signed = tl.where((upper << 1) == 0, tl.maximum(signed, 0), signed).to(tl.uint32, bitcast=True)  # was set to zero
    infinity: tl.constexpr = 0x7F800000 if tl.bfloat16 == HALF else 0x7C000000
    code = upper + tl.where((upper & 0x7FFFFFFF) > infinity, signed & 0xFFFF, signed)
    if tl.bfloat16 == HALF:
        return code.to(tl.float32, bitcast=True)
    magnitude = code & 0x7FFFFFFF
    normal = (magnitude >> 3) + 0x38000000
    subnormal = magnitude.to(tl.int32, bitcast=True).to(tl.float32) * 9.094947017729282e-13  # 2^-40
    finite = tl.where(magnitude < 0x4000000, subnormal.to(tl.uint32, bitcast=True), normal)
    special = tl.where(magnitude > infinity, 0x7FC00000, 0x7F800000)
    return ((code ^ magnitude) | tl.where(magnitude < infinity, finite, special)).to(tl.float32, bitcast=True)
