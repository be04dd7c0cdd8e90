// 8-bit optimizer moments: blocks of 32 elements of one tensor in memory order, one byte an element and one exponent
// byte a block.
//
// A code is a small float, with the block's exponent in place of a bias. Its top binade holds the block's largest
// value.
//   first moment:  sign, 4 exponent bits, 3 mantissa bits: 15 binades and subnormals below the largest value.
//   second moment: 5 exponent bits, 3 mantissa bits, no sign: 31 binades. A positive value never becomes 0, because the
//   update divides by its root: with a first moment that is not zero the update would be unbounded.
//
// Rounding is stochastic, up in magnitude with a probability equal to the fraction that is cut off (16 random bits).
// With rounding to nearest a moving average stops where its change is below half a unit: 0.1 % a step of a second
// moment, where a unit is 12 %. Encoding is integer arithmetic, so that all backends agree to the bit.
//
// A block that holds an infinity, a NaN or a value above 1.875 * 2^127 has the exponent 255 and decodes to NaN
// throughout.
#pragma once

#include "base/half.h"

namespace ak {

inline constexpr int kBlock8 = 32;              // elements
inline constexpr uint32_t kBlock8NaN = 255;     // the exponent byte of a block that decodes to NaN
inline constexpr uint32_t kNearest16 = 0x8000;  // in place of random bits: to nearest, ties away from zero

// Exponents are those of fp32 with its bias. The least one keeps the unit of the smallest code a normal number.
struct SignedCode8 {
  static constexpr bool kSigned = true;
  static constexpr uint32_t kTop = 15, kLeastExponent = 32;
};
struct UnsignedCode8 {
  static constexpr bool kSigned = false;
  static constexpr uint32_t kTop = 31, kLeastExponent = 48;
};

AK_HD uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The block's exponent byte, from the fp32 code of its largest magnitude: that of the value rounded up to 3 mantissa
// bits, so that no element can round above the largest code.
template <class Code>
AK_HD uint32_t block8_exponent(uint32_t largest) {
  const uint32_t exponent = larger((largest + 0xfffffu) >> 23, Code::kLeastExponent);
  return exponent < kBlock8NaN ? exponent : kBlock8NaN;
}

namespace detail {

// The bits of 2 + x scale, rounded toward zero, for x >= 0 and a power of two.
AK_HD uint32_t above_two(float x, float scale) {
#if defined(__CUDA_ARCH__)
  return bits_of(__fmaf_rz(x, scale, 2.0f));
#else
  const float y = x * scale, sum = y + 2.0f;
  return bits_of(sum) - (sum - 2.0f > y ? 1u : 0u);
#endif
}

}  // namespace detail

inline constexpr uint32_t kBlock8LeastCode = 0x40100000;  // the bits of 2 and a unit

// The scale with which the least binade of codes with an exponent begins at 2.
template <class Code>
AK_HD float block8_scale(uint32_t exponent) {
  return float_of((254 + Code::kTop - exponent) << 23);
}

inline constexpr uint32_t kBlock8Upper = 0x40000000;  // the bits of 2, and one that no smaller number has

// For values of the binades that are scaled to 2 and above: bits whose numbers 20 to 27 are the code of |x|, without
// its sign, less 8, in a block with this exponent byte. The lower bits are the fraction that is cut off.
template <class Code>
AK_HD uint32_t block8_upper(float x, uint32_t exponent) {
  return bits_of(abs(x) * block8_scale<Code>(exponent));
}

// For all values: the code itself. In the upper binades it is that of twice the value; below, of the value plus 2,
// which makes it a fixed-point number. The larger of the two is the one that counts. The fp32 code of 2 has zeros
// there.
template <class Code>
AK_HD uint32_t block8_wide(float x, uint32_t exponent) {
  const float scale = block8_scale<Code>(exponent);
  const uint32_t wide = larger(bits_of(abs(x) * (scale + scale)), detail::above_two(abs(x), scale));
  return Code::kSigned ? wide : larger(wide, x == 0.0f ? 0u : kBlock8LeastCode);
}

// The code of an element, without its sign, in the upper 8 bits; the other bits have no meaning. `random`: 16 bits,
// times 256.
template <class Code>
AK_HD uint32_t block8_round(float x, uint32_t exponent, uint32_t random) {
  return block8_wide<Code>(x, exponent) * 16 + random;
}

// `random`: 16 bits.
template <class Code>
AK_HD uint8_t block8_encode(float x, uint32_t exponent, uint32_t random) {
  const uint32_t sign = Code::kSigned ? bits_of(x) >> 24 & 0x80u : 0u;
  return static_cast<uint8_t>(exponent == kBlock8NaN ? 0u : block8_round<Code>(x, exponent, random * 256) >> 24 | sign);
}

namespace detail {

// The fp32 number with the exponent and mantissa of a code, subnormals included, whose products with powers of two are
// exact. A GPU multiplies subnormals as fast as others; a CPU does not, and may flush them to zero.
template <class Code>
AK_HD float small_of_code(uint32_t code) {
  return float_of(Code::kSigned ? static_cast<uint32_t>(static_cast<int32_t>(code << 24) >> 4) & 0x87f00000u
                                : code << 20);
}

}  // namespace detail

// The exponent bytes of blocks that block8_decode_small decodes: those of values below 2^15, unsigned ones below 2^31.
template <class Code>
AK_HD bool block8_is_small(uint32_t exponent) {
  return exponent <= 127 + Code::kTop;
}

template <class Code>
AK_HD float block8_decode(uint32_t code, uint32_t exponent) {
#if defined(__CUDA_ARCH__)
  const float scale = float_of(exponent == kBlock8NaN ? 0x7fc00000u : exponent << 23);
  return detail::small_of_code<Code>(code) * float_of((254 - Code::kTop) << 23) * scale;
#else
  const uint32_t magnitude = Code::kSigned ? code & 0x7fu : code;
  const uint32_t base = (exponent - Code::kTop) << 23;
  const float least = float_of(exponent == kBlock8NaN ? 0x7fc00000u : base + (1u << 23));
  // A subnormal code m stands for m / 8 of the least binade's first value, but `normal` is (8 + m) / 16 of it. Twice
  // that less one is exact, and the smaller of the two; for the other codes it is the larger one.
  const float normal = float_of(base + (magnitude << 20));
  const float x = min_or_nan(fma(2.0f, normal, -least), normal);
  return Code::kSigned ? float_of(bits_of(x) | (code & 0x80u) << 24) : x;
#endif
}

// block8_decode for a block for which block8_is_small.
template <class Code>
AK_HD float block8_decode_small(uint32_t code, uint32_t exponent) {
#if defined(__CUDA_ARCH__)
  return detail::small_of_code<Code>(code) * float_of((exponent + 127 - Code::kTop) << 23);
#else
  return block8_decode<Code>(code, exponent);
#endif
}

}  // namespace ak
