// Moments of the update ops on the CPU: fp32, bf16, or 8-bit codes (base/block8.h).
//
// Work in 8 bits: some 30 vector instructions for as many elements as a vector has, a third of them for the random bits;
// a step stays bandwidth-bound.
#include "base/block8.h"
#include "update/cpu.h"

namespace ak {
namespace {

// Calls f(first element, exponent byte, number of elements), the last as a constant for whole blocks.
template <typename Byte, typename F>
AK_SIMD_INLINE void each_block(Byte* exponents, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kBlock8 <= n; i += kBlock8) f(i, exponents[i / kBlock8], std::integral_constant<int, kBlock8>{});
  if (i < n) f(i, exponents[i / kBlock8], static_cast<int>(n - i));
}

template <class Code>
AK_SIMD_CLONES void decode_span(const uint8_t* __restrict codes, const uint8_t* __restrict exponents,
                                float* __restrict to, int64_t n) {
  each_block(exponents, n, [&](int64_t first, const uint8_t& exponent, auto count) AK_ALWAYS_INLINE {
    for (int i = 0; i < count; ++i) to[first + i] = block8_decode<Code>(codes[first + i], exponent);
  });
}

template <class Code>
AK_SIMD_CLONES void encode_span(const float* __restrict from, const uint32_t* __restrict random,
                                uint8_t* __restrict codes, uint8_t* __restrict exponents, int64_t n) {
  each_block(exponents, n, [&](int64_t first, uint8_t& byte, auto count) AK_ALWAYS_INLINE {
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = larger(largest, bits_of(abs(from[first + i])));
    const uint32_t exponent = block8_exponent<Code>(largest);
    byte = static_cast<uint8_t>(exponent);
    for (int i = 0; i < count; ++i) {
      codes[first + i] = block8_encode<Code>(from[first + i], exponent, random[first + i]);
    }
  });
}

}  // namespace

float* load_moment(const Param& p, int k, bool is_unsigned, int64_t at, int64_t n, float* buffer) {
  if (!p.in_8_bits()) return load_tile(p.moments[k], p.moment_dtypes[k], at, n, buffer);
  const uint8_t* codes = static_cast<const uint8_t*>(p.moments[k]) + at;
  const uint8_t* exponents = p.exponents[k] + at / kBlock8;
  if (is_unsigned) {
    decode_span<UnsignedCode8>(codes, exponents, buffer, n);
  } else {
    decode_span<SignedCode8>(codes, exponents, buffer, n);
  }
  return buffer;
}

void store_moment(const Param& p, int k, bool is_unsigned, const float* values, int64_t at, int64_t n, RandomKey key) {
  if (!p.in_8_bits()) return store_tile(values, p.moments[k], p.moment_dtypes[k], at, n);
  alignas(64) uint32_t random[kTile];
  key.stream = static_cast<uint32_t>(1 + k);
  random_numbers(random, at, n, key);
  uint8_t* codes = static_cast<uint8_t*>(p.moments[k]) + at;
  uint8_t* exponents = p.exponents[k] + at / kBlock8;
  if (is_unsigned) {
    encode_span<UnsignedCode8>(values, random, codes, exponents, n);
  } else {
    encode_span<SignedCode8>(values, random, codes, exponents, n);
  }
}

}  // namespace ak
