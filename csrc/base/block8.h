// 8-bit optimizer moments: blocks of 32 elements of one tensor in memory order, one byte an element and one exponent
// byte a block.
//
// A code is a small float, with the block's exponent in place of a bias. Its top binade holds the block's largest
// value.
//   first moment:  sign, 4 exponent bits, 3 mantissa bits: 15 binades and subnormals below the largest value.
//   second moment: 5 exponent bits, 3 mantissa bits, no sign: 31 binades. A positive value never becomes 0, because the
//   update divides by its root: with a first moment beside it the update would be without bound.
//
// Rounding is stochastic, up in magnitude with a probability equal to the fraction that is cut off (16 random bits).
// With rounding to nearest a moving average stops where its change is below half a unit: 0.1 % a step of a second
// moment, where a unit is 12 %. Encoding is integer arithmetic, so that all backends agree to the bit.
//
// A block that holds an infinity or a NaN has the exponent 255 and decodes to NaN throughout.
#pragma once

#include "base/half.h"

namespace ak {

inline constexpr int kBlock8 = 32;              // elements
inline constexpr uint32_t kBlock8NaN = 255;     // the exponent byte of a block with a NaN or an infinity
inline constexpr uint32_t kNearest16 = 0x8000;  // in place of random bits: to nearest, ties away from zero

// Exponents are those of fp32 with its bias. The least one keeps the unit of the smallest code a normal number: kUnits
// is the distance from the top binade to that unit.
struct SignedCode8 {
  static constexpr bool kSigned = true;
  static constexpr uint32_t kTop = 15, kLargest = 0x7f;
  static constexpr uint32_t kUnits = kTop + 2, kLeastExponent = 32;
};
struct UnsignedCode8 {
  static constexpr bool kSigned = false;
  static constexpr uint32_t kTop = 31, kLargest = 0xff;
  static constexpr uint32_t kUnits = kTop + 2, kLeastExponent = 48;
};

// The block's exponent byte, from the fp32 code of its largest magnitude: that of the value rounded up to 3 mantissa
// bits, so that no element can round above the largest code.
template <class Code>
AK_HD uint32_t block8_exponent(uint32_t largest) {
  if (largest >= 0x7f800000u) return kBlock8NaN;
  const uint32_t exponent = (largest + 0xfffffu) >> 23;
  if (exponent > 254) return 254;
  return exponent < Code::kLeastExponent ? Code::kLeastExponent : exponent;
}

// The code of an element of a block with this exponent byte. `random` has 16 bits.
template <class Code>
AK_HD uint8_t block8_encode(float x, uint32_t exponent, uint32_t random) {
  if (exponent == kBlock8NaN) return 0;
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  // With 20 bits below the code: above the subnormals the fp32 code relative to the least binade; below, a fixed-point
  // number, whose own bits below 2^-20 of a unit are cut off.
  const uint32_t own = magnitude >> 23, least = exponent - Code::kTop + 1;
  const uint32_t shift = own < least ? least - own : 0;
  const uint32_t significand = (magnitude & 0x7fffffu) | (own == 0 ? 0u : 0x800000u);
  const uint32_t fixed = shift > 31 ? 0u : significand >> shift;
  const uint32_t wide = own < least ? fixed : magnitude - ((least - 1) << 23);
  const uint32_t rounded = (wide + (random << 4)) >> 20;
  uint32_t code = rounded < Code::kLargest ? rounded : Code::kLargest;
  if constexpr (Code::kSigned) {
    code |= bits_of(x) >> 24 & 0x80u;
  } else {
    if (code == 0 && magnitude != 0) code = 1;
  }
  return static_cast<uint8_t>(code);
}

template <class Code>
AK_HD float block8_decode(uint8_t code, uint32_t exponent) {
  if (exponent == kBlock8NaN) return float_of(0x7fc00000u);
  const uint32_t magnitude = Code::kSigned ? code & 0x7fu : code;
  const uint32_t base = (exponent - Code::kTop) << 23;
  // A subnormal code as the difference of two normal numbers of the least binade, which is exact.
  const float normal = float_of(base + (magnitude << 20));
  const float subnormal = float_of(base + ((magnitude + 8) << 20)) - float_of(base + (8u << 20));
  const float x = magnitude < 8 ? subnormal : normal;
  return Code::kSigned && (code & 0x80) ? -x : x;
}

}  // namespace ak
