// fp16 and bf16 by fp32 multiply-adds of 256 bits: operands are widened, exactly, when they are packed.
//
// Work: 16 flops an instruction; 4 x 24 sums in 12 of 16 registers need 7 loads for 12 instructions.
#include "base/cpu/simd.h"

#if AK_X86
#define AK_TARGET __attribute__((target("avx2,fma,f16c")))
#include "gemm/cpu/tile.h"

namespace ak {
namespace {

template <bool kBf16Operands>
struct Lanes256 {
  static constexpr int64_t kLanes = 8, kPair = 1;
  using Words = __m256i;
  using Sums = __m256;

  static AK_VECTOR Words widen(__m128i x) {
    if constexpr (kBf16Operands) return _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
    return _mm256_castps_si256(_mm256_cvtph_ps(x));
  }
  static AK_VECTOR Words load_steps(const uint16_t* from) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static AK_VECTOR Words load_steps(const uint16_t* from, int64_t elements) {
    if (elements >= kLanes) return load_steps(from);
    __m128i x = _mm_setzero_si128();
    if (elements > 0) std::memcpy(&x, from, static_cast<size_t>(2 * elements));
    return widen(x);
  }
  static AK_VECTOR Words load_lanes(const uint16_t* from, int64_t, int64_t elements, int64_t lanes) {
    return load_steps(from, elements > 0 ? lanes : 0);
  }
  static AK_VECTOR void store_words(uint32_t* to, Words v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
  static AK_VECTOR void store_words(uint32_t* to, Words v, int64_t lanes) {
    if (lanes >= kLanes) return store_words(to, v);
    std::memcpy(to, &v, static_cast<size_t>(4 * lanes));
  }
  static AK_VECTOR Words load_words(const uint32_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }
  static AK_VECTOR Words broadcast(const char* word) {
    int value;
    std::memcpy(&value, word, sizeof value);
    return _mm256_set1_epi32(value);
  }
  static AK_VECTOR Sums load_sums(const float* from) { return _mm256_loadu_ps(from); }
  static AK_VECTOR void store_sums(float* to, Sums v) { _mm256_storeu_ps(to, v); }
  static AK_VECTOR Sums zero() { return _mm256_setzero_ps(); }
  static AK_VECTOR float total(Sums v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static AK_VECTOR Sums multiply_add(Words a, Words b, Sums sum) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sum);
  }

  // 8 x 8, in place.
  static AK_VECTOR void transpose(Words (&r)[8]) {
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      const Words even = r[i];
      r[i] = _mm256_unpacklo_epi32(even, r[i + 1]);
      r[i + 1] = _mm256_unpackhi_epi32(even, r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // then r[i + j] holds column 4 h + j of rows i to i + 3 in its half h
      const Words a = r[i], b = r[i + 1], d = r[i + 3];
      r[i] = _mm256_unpacklo_epi64(a, r[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(a, r[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(b, d);
      r[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words low = r[j];
      r[j] = _mm256_permute2x128_si256(low, r[4 + j], 0x20);
      r[4 + j] = _mm256_permute2x128_si256(low, r[4 + j], 0x31);
    }
  }
};

constexpr Kernel kBf16 = tile_kernel<Lanes256<true>, 4, 3>(/*depth=*/256);
constexpr Kernel kFp16 = tile_kernel<Lanes256<false>, 4, 3>(/*depth=*/256);

}  // namespace

const Kernel& avx2_kernel(bool is_bf16) { return is_bf16 ? kBf16 : kFp16; }

}  // namespace ak
#endif
