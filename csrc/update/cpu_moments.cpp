#include "update/cpu_moments.h"

#include "base/block8.h"
#include "base/cpu/isa.h"
#include "base/cpu/tile.h"

#if AK_X86
#include <immintrin.h>
#endif

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
    prefetch_ahead<true>(codes + first);
    for (int i = 0; i < count; ++i) to[first + i] = block8_decode<Code>(codes[first + i], exponent);
  });
}

template <class Code>
AK_SIMD_CLONES void encode_span(const float* __restrict from, const uint16_t* __restrict random,
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

#if AK_X86
#define AK_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

// The elements of a block that are there.
AK_AVX512 uint32_t inside_block(int64_t left) { return left >= kBlock8 ? ~0u : (1u << left) - 1; }

// The formulas of base/block8.h with vectors of 512 bits: compilers choose 256 for their clones. One instruction adds
// and rounds toward zero.
template <class Code>
AK_AVX512 void decode_avx512(const uint8_t* codes, const uint8_t* exponents, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kBlock8) {
    prefetch_ahead<true>(codes + i);
    const uint32_t inside = inside_block(n - i), exponent = exponents[i / kBlock8];
    const uint32_t base = (exponent - Code::kTop) << 23;
    const __m512 less = _mm512_set1_ps(-float_of(exponent == kBlock8NaN ? 0x7fc00000u : base + (1u << 23)));
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = static_cast<__mmask16>(inside >> 16 * half);
      const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i + 16 * half));
      const __m512i magnitude = Code::kSigned ? _mm512_and_si512(code, _mm512_set1_epi32(0x7f)) : code;
      const __m512 normal = _mm512_castsi512_ps(
          _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(base)), _mm512_slli_epi32(magnitude, 20)));
      // The second operand, if either is NaN.
      __m512 x = _mm512_min_ps(normal, _mm512_fmadd_ps(_mm512_set1_ps(2.0f), normal, less));
      if (Code::kSigned) {
        constexpr int kOrAnd = 0xf8;  // a | (b & c)
        x = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(code, 24),
                                                          _mm512_set1_epi32(INT32_MIN), kOrAnd));
      }
      _mm512_mask_storeu_ps(to + i + 16 * half, mask, x);
    }
  }
}

// The largest of 16 numbers, in all places.
AK_AVX512 __m512i largest_of(__m512i x) {
  x = _mm512_max_epu32(x, _mm512_shuffle_i64x2(x, x, 0x4e));
  x = _mm512_max_epu32(x, _mm512_shuffle_i64x2(x, x, 0xb1));
  x = _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
  return _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
}

// `random` has room for whole blocks.
template <class Code>
AK_AVX512 void encode_avx512(const float* from, const uint16_t* random, uint8_t* codes, uint8_t* exponents, int64_t n) {
  for (int64_t i = 0; i < n; i += kBlock8) {
    const uint32_t inside = inside_block(n - i);
    __m512 x[2];
    for (int half = 0; half < 2; ++half) {
      x[half] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(inside >> 16 * half), from + i + 16 * half);
    }
    const __m512i sizes =
        _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(x[0])), _mm512_castps_si512(_mm512_abs_ps(x[1])));
    const __m512i exponent = _mm512_min_epu32(
        _mm512_max_epu32(_mm512_srli_epi32(_mm512_add_epi32(largest_of(sizes), _mm512_set1_epi32(0xfffff)), 23),
                         _mm512_set1_epi32(Code::kLeastExponent)),
        _mm512_set1_epi32(kBlock8NaN));
    exponents[i / kBlock8] = static_cast<uint8_t>(_mm_cvtsi128_si32(_mm512_castsi512_si128(exponent)));
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(exponent, _mm512_set1_epi32(kBlock8NaN));
    const __m512 scale =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254 + Code::kTop), exponent), 23));
    for (int half = 0; half < 2; ++half) {
      const __m512 size = _mm512_abs_ps(x[half]);
      const __m512 above_two =
          _mm512_fmadd_round_ps(size, scale, _mm512_set1_ps(2.0f), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
      __m512i wide = _mm512_max_epu32(_mm512_castps_si512(_mm512_mul_ps(size, _mm512_add_ps(scale, scale))),
                                      _mm512_castps_si512(above_two));
      if (!Code::kSigned) {
        const __mmask16 positive = _mm512_test_epi32_mask(_mm512_castps_si512(size), _mm512_set1_epi32(INT32_MAX));
        wide = _mm512_mask_max_epu32(wide, positive, wide, _mm512_set1_epi32(kBlock8LeastCode));
      }
      const __m512i drawn =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(random + i + 16 * half)));
      __m512i code = _mm512_maskz_srli_epi32(
          finite, _mm512_add_epi32(_mm512_slli_epi32(wide, 4), _mm512_slli_epi32(drawn, 8)), 24);
      if (Code::kSigned) {
        constexpr int kOrAnd = 0xf8;
        code = _mm512_mask_ternarylogic_epi32(code, finite, _mm512_srli_epi32(_mm512_castps_si512(x[half]), 24),
                                              _mm512_set1_epi32(0x80), kOrAnd);
      }
      _mm512_mask_cvtepi32_storeu_epi8(codes + i + 16 * half, static_cast<__mmask16>(inside >> 16 * half), code);
    }
  }
}
#endif

template <class Code>
void decode(const uint8_t* codes, const uint8_t* exponents, float* to, int64_t n) {
#if AK_X86
  if (vector_bits() == 512) return decode_avx512<Code>(codes, exponents, to, n);
#endif
  decode_span<Code>(codes, exponents, to, n);
}

template <class Code>
void encode(const float* from, const uint16_t* random, uint8_t* codes, uint8_t* exponents, int64_t n) {
#if AK_X86
  if (vector_bits() == 512) return encode_avx512<Code>(from, random, codes, exponents, n);
#endif
  encode_span<Code>(from, random, codes, exponents, n);
}

}  // namespace

float* load_moment(const Param& p, int k, bool is_unsigned, int64_t at, int64_t n, float* buffer) {
  if (!p.in_8_bits()) return load_tile(p.moments[k], p.moment_dtypes[k], at, n, buffer);
  const uint8_t* codes = static_cast<const uint8_t*>(p.moments[k]) + at;
  const uint8_t* exponents = p.exponents[k] + at / kBlock8;
  if (is_unsigned) {
    decode<UnsignedCode8>(codes, exponents, buffer, n);
  } else {
    decode<SignedCode8>(codes, exponents, buffer, n);
  }
  return buffer;
}

void store_moment(const Param& p, int k, bool is_unsigned, const float* values, int64_t at, int64_t n, int64_t first,
                  TileNumbers& numbers) {
  if (!p.in_8_bits()) return store_tile(values, p.moments[k], p.moment_dtypes[k], at, n);
  const uint16_t* random = numbers.of(1 + k, first, n);
  uint8_t* codes = static_cast<uint8_t*>(p.moments[k]) + at;
  uint8_t* exponents = p.exponents[k] + at / kBlock8;
  if (is_unsigned) {
    encode<UnsignedCode8>(values, random, codes, exponents, n);
  } else {
    encode<SignedCode8>(values, random, codes, exponents, n);
  }
}

}  // namespace ak
