#include "base/cpu/half_spans.h"

#include "base/cpu/simd.h"

#if AK_X86
#include <immintrin.h>
#endif

namespace ak {
namespace {

void widen_plain(const fp16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
void round_plain(const float* from, fp16* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to<fp16>(from[i]);
}
AK_SIMD_CLONES void round_bf16_plain(const float* __restrict from, bf16* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to<bf16>(from[i]);
}

#if AK_X86

#define AK_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))
#define AK_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define AK_F16C __attribute__((target("avx2,f16c")))

AK_AVX512 void widen_avx512(const fp16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
    _mm_prefetch(reinterpret_cast<const char*>(from + i) + 2048, _MM_HINT_T0);
  }
  const auto rest = static_cast<__mmask16>((1u << (n - i)) - 1);
  _mm512_mask_storeu_ps(to + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, from + i)));
}
// The instruction keeps a NaN's sign and payload; the formula returns 0x7fff for every NaN.
AK_AVX512 inline __attribute__((always_inline)) __m256i rounded(__m512 x) {
  const __m256i y = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_mask_blend_epi16(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), y, _mm256_set1_epi16(0x7fff));
}
AK_AVX512 void round_avx512(const float* from, fp16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), rounded(_mm512_loadu_ps(from + i)));
  const auto rest = static_cast<__mmask16>((1u << (n - i)) - 1);
  _mm256_mask_storeu_epi16(to + i, rest, rounded(_mm512_maskz_loadu_ps(rest, from + i)));
}
// The instruction flushes subnormals to zero and keeps a NaN's payload, so vectors that contain either are rounded by
// the formula.
AK_AVX512_BF16 void round_avx512_bf16(const float* from, bf16* to, int64_t n) {
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80,
                kSpecial = kQuietNan | kSubnormal | kSignallingNan;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 low = _mm512_loadu_ps(from + i), high = _mm512_loadu_ps(from + i + 16);
    if (_mm512_fpclass_ps_mask(low, kSpecial) | _mm512_fpclass_ps_mask(high, kSpecial)) [[unlikely]] {
      round_bf16_plain(from + i, to + i, 32);
    } else {
      _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(from + i);
    if (_mm512_fpclass_ps_mask(x, kSpecial)) [[unlikely]] {
      round_bf16_plain(from + i, to + i, 16);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(x));
    }
  }
  if (i < n) round_bf16_plain(from + i, to + i, n - i);
}

AK_F16C void widen_f16c(const fp16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  widen_plain(from + i, to + i, n - i);
}
AK_F16C void round_f16c(const float* from, fp16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(from + i);
    const __m128i y = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_blendv_epi8(y, _mm_set1_epi16(0x7fff), narrow));
  }
  round_plain(from + i, to + i, n - i);
}

#endif

struct Spans {
  void (*widen)(const fp16*, float*, int64_t);
  void (*round)(const float*, fp16*, int64_t);
  void (*round_bf16)(const float*, bf16*, int64_t);
};

Spans spans() {
#if AK_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return {widen_avx512, round_avx512, __builtin_cpu_supports("avx512bf16") ? round_avx512_bf16 : round_bf16_plain};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    return {widen_f16c, round_f16c, round_bf16_plain};
#endif
  return {widen_plain, round_plain, round_bf16_plain};
}

const Spans kSpans = spans();

}  // namespace

void widen_half(const fp16* from, float* to, int64_t n) { kSpans.widen(from, to, n); }
void round_half(const float* from, fp16* to, int64_t n) { kSpans.round(from, to, n); }
void round_bf16(const float* from, bf16* to, int64_t n) { kSpans.round_bf16(from, to, n); }

}  // namespace ak
