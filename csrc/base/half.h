// The two 16-bit floats, as bit patterns, and their conversions.
//
// to_float(T) is exact. round_to<T>(float) rounds to nearest even, overflows to inf and returns 0x7fff for any NaN, as
// the GPU's cvt.rn does. Both are branch-free, so loops over them vectorize. T may also be float, so that code
// templated on the element type needs no special case.
#pragma once

#include "base/config.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace ak {

struct fp16 {
  uint16_t bits;
};

struct bf16 {
  uint16_t bits;
};

static_assert(sizeof(fp16) == 2 && sizeof(bf16) == 2, "16-bit floats are stored as they stand in memory");

AK_HD bool is_nan(fp16 x) { return (x.bits & 0x7fffu) > 0x7c00u; }
AK_HD bool is_nan(bf16 x) { return (x.bits & 0x7fffu) > 0x7f80u; }
AK_HD bool is_finite(fp16 x) { return (x.bits & 0x7c00u) != 0x7c00u; }
AK_HD bool is_finite(bf16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }

AK_HD float to_float(float x) { return x; }

AK_HD float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

AK_HD float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Normal: shift the fields and rebias the exponent (127 - 15 = 112). inf and NaN need 112 more to reach 255.
  const uint32_t special = magnitude >= 0x7c00u ? 112u << 23 : 0u;
  const uint32_t normal = (magnitude << 13) + (112u << 23) + special;
  // Subnormal: place the 10 bits below a leading one of weight 2^-14, then subtract that one, exactly.
  const uint32_t subnormal = bits_of(float_of((magnitude << 13) + (113u << 23)) - 0x1p-14f);
  return float_of(sign | (magnitude < 0x0400u ? subnormal : normal));
#endif
}

namespace detail {

template <typename T>
struct RoundTo;

template <>
struct RoundTo<float> {
  static AK_HD float apply(float x) { return x; }
};

template <>
struct RoundTo<bf16> {
  static AK_HD bf16 apply(float x) {
#if defined(__CUDA_ARCH__)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    const uint32_t u = bits_of(x);
    // Add 0x7fff, plus one if the last kept bit is odd: ties to even. A carry into the exponent is correct.
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(is_nan(x) ? 0x7fffu : rounded)};
#endif
  }
};

template <>
struct RoundTo<fp16> {
  static AK_HD fp16 apply(float x) {
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    // Normal result: as for bf16, dropping 13 bits, after rebiasing the exponent.
    const uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal result: adding 0.5 aligns the last bit of the sum with fp16's last bit, 2^-24, so the adder rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t limited =
        magnitude >= (143u << 23) ? 0x7c00u : finite;  // 65536 and above; 65520 has been rounded up to it
    return {static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fffu : sign | limited)};
#endif
  }
};

}  // namespace detail

template <typename T>
AK_HD T round_to(float x) {
  return detail::RoundTo<T>::apply(x);
}

}  // namespace ak
