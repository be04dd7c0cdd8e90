// The plain form (update/cpu_plain8.h) with vectors of 256 bits, for one block of 32 elements at a time.
#pragma once

#include <utility>

#include "update/cpu_plain8_formula.h"

#if AK_HAS_PLAIN8
#define AK_V3 __attribute__((target("arch=x86-64-v3")))
#define AK_V3_INLINE __attribute__((target("arch=x86-64-v3"), always_inline)) inline
#define AK_V3_LAMBDA __attribute__((target("arch=x86-64-v3"), always_inline))

namespace ak::plain8::avx2 {

inline constexpr int kVectors = kBlock8 / 8;

AK_V3_INLINE __m256i all(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }

// In memory: the compiler makes known ones anew in each round, by slow broadcasts.
struct Constants {
  __m256i code_bits = all(0xbf80bf80), normal = all(0x08080808), number = all(0x7fffffff), upper = all(0x04000400),
          low = all(0x00ff00ff), sign = all(0x80808080), least_code = all(kLeastCode * 0x01010101u),
          lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7),
          order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));

  AK_V3_INLINE Constants() { asm("" : "+m"(*this)); }
};

// False if the block is not plain. A signed code has the fields of fp16, subnormals included.
template <class Code>
AK_V3_INLINE bool decode_block(const Constants& c, const uint8_t* codes, uint32_t exponent, __m256 (&x)[kVectors]) {
  if constexpr (Code::kSigned) {
    for (int half = 0; half < 2; ++half) {
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half)));
      const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), c.code_bits);
      const __m256 scale = _mm256_set1_ps(float_of(exponent << 23));
      x[2 * half] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale);
      x[2 * half + 1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scale);
    }
    return exponent != kBlock8NaN;
  }
  const __m256i base = all((exponent - Code::kTop) << 23),
                all_codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  for (int v = 0; v < kVectors; ++v) {
    const __m128i code = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * v));
    x[v] = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(code), 20), base));
  }
  const __m256i normal = _mm256_cmpeq_epi8(_mm256_min_epu8(all_codes, c.normal), c.normal);
  return exponent != kBlock8NaN && _mm256_movemask_epi8(normal) == -1;
}

// The exponent byte of a block.
template <class Code>
AK_V3_INLINE uint32_t exponent_of(const Constants& c, const __m256 (&x)[kVectors]) {
  __m256i largest = _mm256_setzero_si256();
  for (int v = 0; v < kVectors; ++v) {
    const __m256i bits = _mm256_castps_si256(x[v]);
    largest = _mm256_max_epu32(largest, Code::kSigned ? _mm256_and_si256(bits, c.number) : bits);
  }
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
  return block8_exponent<Code>(static_cast<uint32_t>(_mm_cvtsi128_si32(four)));
}

// Encodes a block; returns false, and stores nothing, if a code is below kLeastCode. `random`: of the weight, whose
// words change places for another value (base/philox.h).
template <class Code, int kValue>
AK_V3_INLINE bool encode_block(const Constants& c, const __m256 (&x)[kVectors], uint32_t exponent,
                               const uint16_t* random, uint8_t* codes) {
  constexpr int kOrder = kValue | (1 ^ kValue) << 2 | (2 ^ kValue) << 4 | (3 ^ kValue) << 6;
  // Half of block8_scale: codes of kLeastCode and above begin at 2.
  const __m256 scale = _mm256_set1_ps(float_of((253 + Code::kTop - exponent) << 23));
  const auto words_of = [&](int v) AK_V3_LAMBDA {  // the upper halves of 16 words, in the order of Constants::order
    __m256i word[2];
    for (int k = 0; k < 2; ++k) {
      const __m128i drawn = _mm_loadu_si128(reinterpret_cast<const __m128i*>(random + 8 * (v + k)));
      word[k] = _mm256_add_epi32(_mm256_srai_epi32(_mm256_castps_si256(_mm256_mul_ps(x[v + k], scale)), 4),
                                 _mm256_cvtepu16_epi32(_mm_shuffle_epi32(drawn, kOrder)));
    }
    return _mm256_blend_epi16(_mm256_srli_epi32(word[0], 16), word[1], 0xaa);
  };
  const __m256i low = words_of(0), high = words_of(2);
  if (!_mm256_testc_si256(_mm256_and_si256(low, high), c.upper)) [[unlikely]]
    return false;  // one below 2
  __m256i bytes =
      _mm256_add_epi8(_mm256_packus_epi16(_mm256_and_si256(low, c.low), _mm256_and_si256(high, c.low)), c.least_code);
  if constexpr (Code::kSigned) {
    bytes = _mm256_or_si256(bytes, _mm256_and_si256(_mm256_packs_epi16(low, high), c.sign));
  }
  bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(bytes, c.order), c.lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  return true;
}

// Calls f<m>() for m = 0 .. N - 1.
template <int N, class F>
AK_V3_INLINE void for_each(const F& f) {
  [&]<int... m>(std::integer_sequence<int, m...>)
      AK_V3_LAMBDA { (f.template operator()<m>(), ...); }(std::make_integer_sequence<int, N>{});
}

// Elements [at, at + n) of a parameter, a tile at most and whole blocks. `element`: the formula, element(weight,
// moments, gradient).
template <class Rule, bool kOptional, class Element, class General>
AK_V3 void update(const Param& p, int64_t at, int64_t n, float* weights, const float* grads, TileNumbers& numbers,
                  const Element& formula, const General& general) {
  constexpr int kThere = kOptional ? Rule::kMoments : Rule::kRequiredMoments;
  const Element element = formula;
  uint8_t *codes[kThere], *exponents[kThere];
  for (int m = 0; m < kThere; ++m) {
    codes[m] = static_cast<uint8_t*>(p.moments[m]) + at;
    exponents[m] = p.exponents[m] + at / kBlock8;
  }
  const uint16_t* random = numbers.of(0);
  const Constants c;
  for (int64_t i = 0; i < n; i += kBlock8) {
    const int64_t block = i / kBlock8;
    if (block % 2 == 0) {
      prefetch_lines(p.grad, bytes_of(p.grad_dtype), at + i);
      prefetch_lines(p.param, bytes_of(p.param_dtype), at + i);
      prefetch_lines(p.master, master_bytes(p.master_kind), at + i);
      for (int m = 0; m < kThere; ++m) prefetch_lines(p.moments[m], 1, at + i);
    }
    __m256 weight[kVectors], moments[kThere][kVectors];
    uint32_t exponent[kThere];
    bool plain = true;
    for_each<kThere>([&]<int m>() AK_V3_LAMBDA {
      plain &= decode_block<CodeOf<Rule, m>>(c, codes[m] + i, exponents[m][block], moments[m]);
    });
    if (plain) {
      for_each<kVectors>([&]<int v>() AK_V3_LAMBDA {
        weight[v] = _mm256_loadu_ps(weights + i + 8 * v);
        update_vector<Rule>(element, _mm256_loadu_ps(grads + i + 8 * v), weight[v], moments, v);
      });
      for_each<kThere>([&]<int m>() AK_V3_LAMBDA {
        exponent[m] = exponent_of<CodeOf<Rule, m>>(c, moments[m]);
        plain &= exponent[m] != kBlock8NaN;
      });
    }
    if (!plain) [[unlikely]] {
      general(i, kBlock8);
      continue;
    }
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(weights + i + 8 * v, weight[v]);
    for_each<kThere>([&]<int m>() AK_V3_LAMBDA {
      if (encode_block<CodeOf<Rule, m>, 1 + m>(c, moments[m], exponent[m], random + i, codes[m] + i)) [[likely]] {
        exponents[m][block] = static_cast<uint8_t>(exponent[m]);
      } else {
        store_moment(p, m, is_unsigned<Rule>(m), reinterpret_cast<const float*>(moments[m]), at + i, kBlock8, i,
                     numbers);
      }
    });
  }
}

}  // namespace ak::plain8::avx2
#endif
