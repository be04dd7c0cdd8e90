// The bins of an exponent histogram.
#pragma once

#include "base/config.h"

namespace ak {

// Bin 0: zeros. Bin 1 + i: values with floor(log2 |x|) = kLeastExponent + i, from fp32's smallest subnormal to its
// largest number. Then infinity, then NaN.
inline constexpr int kLeastExponent = -149;
inline constexpr int kInfinityBin = 278;
inline constexpr int kNanBin = 279;
inline constexpr int kExponentBins = 280;

// `magnitude`: the bits of |x|. A subnormal is an integer below 2^23 in units of 2^-149, so it is exact as an fp32
// number, whose exponent is then that of the integer.
AK_HD uint32_t exponent_bin(uint32_t magnitude) {
  const uint32_t exponent = magnitude >> 23;
  const uint32_t of_subnormal = (bits_of(static_cast<float>(static_cast<int32_t>(magnitude))) >> 23) - 126;
  const uint32_t of_finite = exponent == 0 ? of_subnormal : exponent + 23;
  const uint32_t of_number = magnitude == 0 ? 0u : of_finite;
  const uint32_t of_special = magnitude > 0x7f800000u ? kNanBin : kInfinityBin;
  return exponent == 0xff ? of_special : of_number;
}

}  // namespace ak
