#pragma once
// Moments in 8 bits (base/block8.h) in registers: a thread has eight elements of a block, which four lanes share, or
// one of a block that a warp shares.
#include <type_traits>
#include <utility>

#include "base/block8.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "update/rule.h"

namespace ak {

/// The codes of a thread's elements, and the exponent byte of their block.
template <int V>
struct Codes {
  uint32_t words[V == 8 ? 2 : 1];
  uint32_t exponent;
};

/// The format of moment m.
template <class Rule, int m>
using CodeOf = std::conditional_t<is_unsigned<Rule>(m), UnsignedCode8, SignedCode8>;

/// Calls f<m>() for m = 0 .. N - 1.
template <int N, class F>
AK_DEVICE void for_each_moment(F f) {
  [&]<int... m>(std::integer_sequence<int, m...>) {
    (f.template operator()<m>(), ...);
  }(std::make_integer_sequence<int, N>{});
}

/// The block of element i.
AK_DEVICE int64_t block8_of(int64_t i) { return static_cast<int64_t>(static_cast<uint64_t>(i) / kBlock8); }

/// Elements i .. i + V - 1; for V = 8 the codes are aligned to 8 bytes and i is a multiple of 8.
template <int V>
AK_DEVICE Codes<V> fetch_codes(const void* codes, const uint8_t* exponents, int64_t i) {
  Codes<V> raw{};
  if constexpr (V == 8) {
    const auto words =
        load_vec<2, Cache::kStreaming>(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(codes) + i));
    raw.words[0] = words[0];
    raw.words[1] = words[1];
  } else {
    raw.words[0] = load<Cache::kStreaming>(static_cast<const uint8_t*>(codes) + i);
  }
  raw.exponent = load(exponents + block8_of(i));
  return raw;
}

/// One lane of a block writes its exponent.
template <int V>
AK_DEVICE void store_codes(void* codes, uint8_t* exponents, int64_t i, const Codes<V>& raw) {
  if constexpr (V == 8) {
    store_vec<Cache::kStreaming>(reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(codes) + i),
                                 Vec<uint32_t, 2>{{raw.words[0], raw.words[1]}});
  } else {
    store<Cache::kStreaming>(static_cast<uint8_t*>(codes) + i, static_cast<uint8_t>(raw.words[0]));
  }
  if (i % kBlock8 == 0) store(exponents + block8_of(i), static_cast<uint8_t>(raw.exponent));
}

/// Element j.
template <class Code, int V>
AK_DEVICE float decode_code(const Codes<V>& raw, int j) {
  return block8_decode<Code>(raw.words[j / 4] >> 8 * (j % 4) & 0xffu, raw.exponent);
}

/// The upper bytes of four words. The compiler finds no prmt in the shifts.
AK_DEVICE uint32_t upper_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
#else
  return a >> 24 | b >> 24 << 8 | c >> 24 << 16 | (d & 0xff000000u);
#endif
}

/// NaN if either is NaN.
AK_DEVICE float larger_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return max_or_nan(a, b);
#else
  return is_nan(b) ? b : max_or_nan(a, b);
#endif
}

/// Called by all lanes of a warp. The values of lanes without an element are 0. `random`: as in block8_round.
template <class Code, int V>
AK_DEVICE Codes<V> encode_codes(const float (&x)[V], const uint32_t (&random)[V]) {
  float of_all = abs(x[0]);
  AK_UNROLL
  for (int j = 1; j < V; j++) of_all = larger_or_nan(of_all, abs(x[j]));
  uint32_t largest = bits_of(of_all);
  constexpr int kLanes = kBlock8 / V;
  AK_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) largest = larger(largest, shuffle_xor(largest, mask));
  Codes<V> raw;
  raw.exponent = block8_exponent<Code>(largest);
  if constexpr (V == 1) {
    raw.words[0] = block8_encode<Code>(x[0], raw.exponent, random[0] / 256);
  } else {
    AK_UNROLL
    for (int w = 0; w < 2; w++) {
      uint32_t code[4], sign[4];
      AK_UNROLL
      for (int j = 0; j < 4; j++) {
        code[j] = block8_round<Code>(x[4 * w + j], raw.exponent, random[4 * w + j]);
        sign[j] = Code::kSigned ? bits_of(x[4 * w + j]) : 0;
      }
      const uint32_t signs = upper_bytes(sign[0], sign[1], sign[2], sign[3]) & 0x80808080u;
      raw.words[w] = raw.exponent == kBlock8NaN ? 0u : upper_bytes(code[0], code[1], code[2], code[3]) | signs;
    }
  }
  return raw;
}

}  // namespace ak
