// The vectors of 512 bits of gemm_tile.h. Included by the files of the instruction sets that have them, each with its
// own AK_TARGET.
#pragma once

#include "gemm/cpu/tile.h"

namespace ak {
namespace {

AK_VECTOR __mmask16 first16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
AK_VECTOR __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

// 32-bit lanes and fp32 sums, 16 of each.
struct Lanes512 {
  static constexpr int64_t kLanes = 16;
  using Words = __m512i;
  using Sums = __m512;

  static AK_VECTOR void store_words(uint32_t* to, Words v) { _mm512_storeu_si512(to, v); }
  static AK_VECTOR void store_words(uint32_t* to, Words v, int64_t lanes) {
    _mm512_mask_storeu_epi32(to, first16(lanes), v);
  }
  static AK_VECTOR Words load_words(const uint32_t* from) { return _mm512_load_si512(from); }
  static AK_VECTOR Words broadcast(const char* word) {
    int value;
    std::memcpy(&value, word, sizeof value);
    return _mm512_set1_epi32(value);
  }
  static AK_VECTOR Sums load_sums(const float* from) { return _mm512_loadu_ps(from); }
  static AK_VECTOR void store_sums(float* to, Sums v) { _mm512_storeu_ps(to, v); }
  static AK_VECTOR Sums zero() { return _mm512_setzero_ps(); }
  static AK_VECTOR float total(Sums v) { return _mm512_reduce_add_ps(v); }

  // The 4 x 4 words of each quarter of r[i] to r[i + 3], i a multiple of 4.
  static AK_VECTOR void transpose_quarters(Words (&r)[16]) {
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      const Words even = r[i];
      r[i] = _mm512_unpacklo_epi32(even, r[i + 1]);
      r[i + 1] = _mm512_unpackhi_epi32(even, r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const Words a = r[i], b = r[i + 1];
      r[i] = _mm512_unpacklo_epi64(a, r[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(a, r[i + 2]);
      const Words d = r[i + 3];
      r[i + 2] = _mm512_unpacklo_epi64(b, d);
      r[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
  }

  // 16 x 16, in place, so that 20 registers are enough.
  static AK_VECTOR void transpose(Words (&r)[16]) {
    transpose_quarters(r);  // then r[i + j] holds column 4 q + j of rows i to i + 3 in its quarter q
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
      const Words even2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
      const Words odd2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
      r[j] = _mm512_shuffle_i32x4(even, even2, 0x88);
      r[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
      r[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xdd);
      r[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
  }
};

// A word is a pair of 16-bit elements.
struct PairWords : Lanes512 {
  static constexpr int64_t kPair = 2;

  static AK_VECTOR Words load_steps(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static AK_VECTOR Words load_steps(const uint16_t* from, int64_t elements) {
    return _mm512_maskz_loadu_epi16(first32(elements), from);
  }
  // Loads put the quarters of four rows side by side, which halves the shuffles of a transposition.
  static AK_VECTOR void load_transposed(const uint16_t* from, int64_t lane_stride, Words (&square)[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const auto quarter = [from, lane_stride, i](int row) AK_VECTOR_LAMBDA {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (row + i % 4) * lane_stride + i / 4 * 8));
      };
      Words words = _mm512_castsi128_si512(quarter(0));
      words = _mm512_mask_broadcast_i32x4(words, 0x00f0, quarter(4));
      words = _mm512_mask_broadcast_i32x4(words, 0x0f00, quarter(8));
      square[i] = _mm512_mask_broadcast_i32x4(words, 0xf000, quarter(12));
    }
    transpose_quarters(square);
  }
  static AK_VECTOR Words load_lanes(const uint16_t* from, int64_t k_stride, int64_t elements, int64_t lanes) {
    const __mmask16 mask = first16(lanes);
    const __m256i low = _mm256_maskz_loadu_epi16(elements > 0 ? mask : 0, from);
    const __m256i high = _mm256_maskz_loadu_epi16(elements > 1 ? mask : 0, from + k_stride);
    const __m512i pairs = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(_mm512_castsi256_si512(low), pairs, _mm512_castsi256_si512(high));
  }
};

// A word is an fp32 number, widened from an fp16 or a bf16.
template <bool kBf16>
struct WideWords : Lanes512 {
  static constexpr int64_t kPair = 1;

  static AK_VECTOR Words widen(__m256i x) {
    if constexpr (kBf16) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
    return _mm512_castps_si512(_mm512_cvtph_ps(x));
  }
  static AK_VECTOR Words load_steps(const uint16_t* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static AK_VECTOR Words load_steps(const uint16_t* from, int64_t elements) {
    return widen(_mm256_maskz_loadu_epi16(first16(elements), from));
  }
  static AK_VECTOR Words load_lanes(const uint16_t* from, int64_t, int64_t elements, int64_t lanes) {
    return load_steps(from, elements > 0 ? lanes : 0);
  }
  static AK_VECTOR Sums multiply_add(Words a, Words b, Sums sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

}  // namespace
}  // namespace ak
