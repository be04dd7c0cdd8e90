#pragma once
// Moments in 8 bits (base/block8.h) in registers: a thread has eight elements of a block, which four lanes share, or
// one of a block that a warp shares.
#include <utility>

#include "base/block8.h"
#include "base/permute_bytes.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "update/rule.h"

namespace ak {

/// The codes of a thread's elements, and the exponent byte of their block.
template <int V>
struct Codes {
  uint32_t words[V == 8 ? 2 : 1];
  uint32_t exponent;
  bool normal;  // eight elements, after encode_codes: all are in the upper binades
};

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
  const uint32_t code = raw.words[j / 4] >> 8 * (j % 4) & 0xffu;
  if constexpr (V == 1) {
    return block8_decode<Code>(code, raw.exponent);
  } else {
    return block8_decode_small<Code>(code, raw.exponent);
  }
}

/// The upper bytes of four words. The compiler finds no prmt in shifts.
AK_DEVICE uint32_t upper_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return permute_bytes(permute_bytes(a, b, 0x0073), permute_bytes(c, d, 0x0073), 0x5410);
}

/// The largest magnitude, as its bits; NaN counts as the largest.
template <class Code, int V>
AK_DEVICE uint32_t largest_bits(const float (&x)[V]) {
  if constexpr (!Code::kSigned) {
    uint32_t largest = bits_of(x[0]);
    AK_UNROLL
    for (int j = 1; j < V; j++) largest = larger(largest, bits_of(x[j]));
    return largest;
  }
  float largest = abs(x[0]);
  AK_UNROLL
  for (int j = 1; j < V; j++) largest = max_or_nan(largest, abs(x[j]));
  return bits_of(largest);
}

/// Called by all lanes of a warp. The values of lanes without an element are 0. `random`: as in block8_round. Without
/// kUpper there are fewer registers and more instructions.
template <class Code, bool kUpper, int V>
AK_DEVICE Codes<V> encode_codes(const float (&x)[V], const uint32_t (&random)[V]) {
  uint32_t largest = largest_bits<Code>(x);
  constexpr int kLanes = kBlock8 / V;
  AK_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) largest = larger(largest, shuffle_xor(largest, mask));
  Codes<V> raw;
  raw.exponent = block8_exponent<Code>(largest);
  if constexpr (V == 1) {
    raw.words[0] = block8_encode<Code>(x[0], raw.exponent, random[0] / 256);
  } else {
    // Mostly all eight are in the upper binades.
    uint32_t wide[8], all = !kUpper || raw.exponent == kBlock8NaN ? 0u : ~0u;
    AK_UNROLL
    for (int j = 0; kUpper && j < 8; j++) all &= wide[j] = block8_upper<Code>(x[j], raw.exponent);
    raw.normal = (all & kBlock8Upper) != 0;
    if (!raw.normal) {
      AK_UNROLL
      for (int j = 0; j < 8; j++) wide[j] = raw.exponent == kBlock8NaN ? 0 : block8_wide<Code>(x[j], raw.exponent);
    }
    const uint32_t less = raw.normal ? 0x08080808u : 0u;
    const uint32_t sign = Code::kSigned && raw.exponent != kBlock8NaN ? 0x80808080u : 0u;
    AK_UNROLL
    for (int w = 0; w < 2; w++) {
      uint32_t code[4], signs = 0;
      AK_UNROLL
      for (int j = 0; j < 4; j++) code[j] = wide[4 * w + j] * 16 + random[4 * w + j];
      if constexpr (Code::kSigned) {
        const float* four = x + 4 * w;
        signs = upper_bytes(bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])) & sign;
      }
      raw.words[w] = (upper_bytes(code[0], code[1], code[2], code[3]) + less) | signs;
    }
  }
  return raw;
}

/// True if all values are of that range, by their block's exponent alone. `raw`: from encode_codes.
template <class Code>
AK_DEVICE bool is_block_within(const Codes<8>& raw, Magnitudes range) {
  const uint32_t least = 127 + range.least + Code::kTop, most = 127 + range.most;
  return raw.normal & (raw.exponent - least < most - least);
}

/// True if each value is 0 or of that range.
AK_DEVICE bool are_within(const float (&x)[8], Magnitudes range) {
  const float least = float_of((127 + range.least) << 23), most = float_of((127 + range.most) << 23);
  bool within = true;
  AK_UNROLL
  for (int j = 0; j < 8; j++) {
    within &= (abs(x[j]) >= least && abs(x[j]) < most) || bits_of(x[j]) == 0;  // -0 is not: its quotient would be +0
  }
  return within;
}

}  // namespace ak
