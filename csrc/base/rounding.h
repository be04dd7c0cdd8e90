// Rounding to 16 bits: stochastic, and half away from zero.
//
// Both use the "wide code" of a value: 32 bits with sign and exponent of the 16-bit type and 16 more mantissa bits. The
// upper half of the code is the value truncated to 16 bits, the lower half the truncated fraction of a unit in the last
// place. Every rounding adds to the lower half and keeps the upper half; a carry into the exponent is correct.
//   bf16: the wide code is the fp32 code.
//   fp16: 5 exponent bits, 26 mantissa bits. These are 3 more than fp32's, so 2^-14 <= |x| < 65536 are exact. Below
//   2^-14
//         the code is a fixed-point number in units of 2^-40: exact from 2^-17 on (where the last bit of an fp32 weighs
//         2^-40), rounded to nearest even below. 65536 and above is inf.
#pragma once

#include "base/half.h"

namespace ak {

template <typename T>
AK_HD uint32_t wide_code(float x);

// The same for every x but NaN.
template <typename T>
AK_HD uint32_t wide_code_of_number(float x);

template <>
AK_HD uint32_t wide_code_of_number<bf16>(float x) {
  return bits_of(x);
}

template <>
AK_HD uint32_t wide_code_of_number<fp16>(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u;
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23)) << 3;
  // In units of 2^-40, clamped so that the conversion to int stays in range for normal values. From 2^23 units on there
  // is no fraction; below, adding and subtracting 2^23 rounds it.
  const float units = float_of(magnitude < (113u << 23) ? magnitude : (113u << 23)) * 0x1p40f;
  const float rounded = (units + 0x1p23f) - 0x1p23f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(units < 0x1p23f ? rounded : units));
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  return sign | (magnitude < (143u << 23) ? finite : 0x7c000000u);
}

template <>
AK_HD uint32_t wide_code<bf16>(float x) {
  return is_nan(x) ? bits_of(x) | 0x00400000u : bits_of(x);
}

template <>
AK_HD uint32_t wide_code<fp16>(float x) {
  return is_nan(x) ? (bits_of(x) & 0x80000000u) | 0x7e000000u : wide_code_of_number<fp16>(x);
}

template <typename T>
AK_HD float from_wide_code(uint32_t code);

template <>
AK_HD float from_wide_code<bf16>(uint32_t code) {
  return float_of(code);
}

// Truncates normal codes with more than 23 mantissa bits, which wide_code never returns.
template <>
AK_HD float from_wide_code<fp16>(uint32_t code) {
  const uint32_t sign = code & 0x80000000u;
  const uint32_t magnitude = code & 0x7fffffffu;
  const uint32_t normal = (magnitude >> 3) + (112u << 23);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-40f);
  const uint32_t finite = magnitude < (1u << 26) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7c000000u ? 0x7fc00000u : 0x7f800000u;
  return float_of(sign | (magnitude < 0x7c000000u ? finite : special));
}

template <typename T>
AK_HD T round_half_away(float x) {
  return {static_cast<uint16_t>(is_nan(x) ? 0x7fffu : (wide_code<T>(x) + 0x8000u) >> 16)};
}

// Rounds up in magnitude with a probability equal to the truncated fraction, given `random16` uniform in [0, 65536).
// Unbiased: exactly for bf16 and for fp16 from 2^-17 on, to within 2^-41 below. Keeps inf and NaN.
template <typename T>
AK_HD T round_stochastic(float x, uint32_t random16) {
  return {static_cast<uint16_t>(is_nan(x) ? 0x7fffu : (wide_code<T>(x) + (random16 & 0xffffu)) >> 16)};
}

template <>
AK_HD float round_stochastic<float>(float x, uint32_t) {
  return x;
}

}  // namespace ak
