"""csrc/base/rounding.h and philox.h for Triton: stochastic rounding to 16 bits, bit for bit the same.

All of it is arithmetic on the bits, in unsigned 32-bit integers that wrap around.
"""

import triton
import triton.language as tl


@triton.jit
def wide_code(x, HALF: tl.constexpr):
    """Sign and exponent as in the 16-bit type ``HALF``, with 16 more mantissa bits."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if tl.bfloat16 == HALF:
        return tl.where(magnitude > 0x7F800000, bits | 0x400000, bits)
    normal = (magnitude - 0x38000000) << 3  # rebiased by 112
    # Below 2^-14, in units of 2^-40. The limit keeps the conversion to int in range when the value is normal. From 2^23
    # units on there is no fraction, below that adding and subtracting 2^23 rounds it away.
    limited = tl.where(magnitude < 0x38800000, magnitude, 0x38800000)
    units = limited.to(tl.float32, bitcast=True) * 1099511627776.0
    rounded = (units + 8388608.0) - 8388608.0
    subnormal = tl.where(units < 8388608.0, rounded, units).to(tl.int32).to(tl.uint32, bitcast=True)
    finite = tl.where(magnitude < 0x38800000, subnormal, normal)
    code = tl.where(magnitude < 0x47800000, finite, 0x7C000000)
    return (bits ^ magnitude) | tl.where(magnitude > 0x7F800000, 0x7E000000, code)


@triton.jit
def rounding_bits(seed, step, index, first, N: tl.constexpr, VALUE: tl.constexpr = 0):
    """16 random bits, in unsigned 32-bit integers, for each of elements ``first`` .. ``first + N - 1`` of parameter
    ``index`` at ``step``. ``first`` and ``N`` are multiples of 8."""
    return bits_of_groups(seed, step, index, first // 8 + tl.arange(0, N // 8), VALUE)


@triton.jit
def bits_of_groups(seed, step, index, group, VALUE: tl.constexpr):
    """The same for groups of eight elements, by their numbers. Eight elements share one call of the generator, and so do the
    weight (``VALUE`` 0) and moment ``k`` (1 + k): equal calls are one when compiled."""
    words = tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), index, step)
    word0, word1, word2, word3 = words[VALUE], words[1 ^ VALUE], words[2 ^ VALUE], words[3 ^ VALUE]
    # Element 4 a + 2 b + c of a group gets half c of word 2 a + b; a join appends the dimension that moves fastest.
    lower = tl.join(tl.join(word0 & 0xFFFF, word2 & 0xFFFF), tl.join(word1 & 0xFFFF, word3 & 0xFFFF))
    upper = tl.join(tl.join(word0 >> 16, word2 >> 16), tl.join(word1 >> 16, word3 >> 16))
    return tl.reshape(tl.join(lower, upper), (group.shape[0] * 8,))


@triton.jit
def round_stochastic(x, random16, HALF: tl.constexpr):
    """``x`` rounded up in magnitude with a probability equal to the fraction cut off, as the int16 bits of ``HALF``."""
    code = tl.where(x != x, 0x7FFFFFFF, wide_code(x, HALF) + random16) >> 16
    return code.to(tl.uint16).to(tl.int16, bitcast=True)
