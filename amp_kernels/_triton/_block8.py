"""csrc/base/block8.h for Triton: moments in 8 bits, bit for bit the same. N elements are N / 32 blocks.

All of it is arithmetic on the bits, in unsigned 32-bit integers that wrap around, and exact operations.
"""

import triton
import triton.language as tl

from .._raw._block8 import BLOCK, FIRST, NAN, SECOND

BLOCK8, NAN8 = tl.constexpr(BLOCK), tl.constexpr(NAN)
TOP, LEAST = (tl.constexpr((getattr(FIRST, name), getattr(SECOND, name))) for name in ("top", "least"))


@triton.jit
def _each(of_block, N: tl.constexpr):
    """A value a block, for each of its elements."""
    return tl.reshape(tl.broadcast_to(of_block[:, None], (N // BLOCK8, BLOCK8)), (N,))


@triton.jit
def _of_blocks(x):
    """The largest of each block."""
    return tl.max(tl.reshape(x, (x.shape[0] // BLOCK8, BLOCK8)), 1)


@triton.jit
def block_mask(mask):
    """The mask of the exponents of masked elements."""
    return _of_blocks(mask.to(tl.int32)) != 0


@triton.jit
def decode(codes, exponents, UNSIGNED: tl.constexpr):
    code = codes.to(tl.uint32)
    exponent = _each(exponents.to(tl.uint32), codes.shape[0])
    magnitude = code if UNSIGNED else code & 0x7F
    base = (exponent - TOP[UNSIGNED]) << 23
    least = (base + 0x800000).to(tl.float32, bitcast=True)
    normal = (base + (magnitude << 20)).to(tl.float32, bitcast=True)
    x = tl.minimum(tl.fma(2.0, normal, -least), normal)
    if not UNSIGNED:
        x = (x.to(tl.uint32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where(exponent == NAN8, float("nan"), x)


@triton.jit
def encode(x, random16, UNSIGNED: tl.constexpr):
    """Codes and exponents, both uint8. Elements that are not there are 0."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponents = tl.minimum(tl.maximum((_of_blocks(magnitude) + 0xFFFFF) >> 23, LEAST[UNSIGNED]), NAN8).to(tl.uint32)
    exponent = _each(exponents, x.shape[0])
    scale = ((254 + TOP[UNSIGNED] - exponent) << 23).to(tl.float32, bitcast=True)
    y = magnitude.to(tl.float32, bitcast=True) * scale
    above = y + 2.0  # rounded toward zero
    wide = above.to(tl.uint32, bitcast=True) - tl.where(above - 2.0 > y, 1, 0).to(tl.uint32)
    wide = tl.maximum(wide, (y + y).to(tl.uint32, bitcast=True))
    if UNSIGNED:
        wide = tl.where((magnitude != 0) & (wide < 0x40100000), 0x40100000, wide).to(tl.uint32)
    code = (wide * 16 + random16 * 256) >> 24
    if not UNSIGNED:
        code |= (bits >> 24) & 0x80
    return tl.where(exponent == NAN8, 0, code).to(tl.uint8), exponents.to(tl.uint8)
