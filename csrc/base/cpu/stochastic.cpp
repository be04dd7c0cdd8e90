#include "base/cpu/stochastic.h"

#include "base/cpu/isa.h"
#include "base/philox.h"
#include "base/rounding.h"

#if AK_X86
#include <immintrin.h>
#endif

namespace ak {
namespace {

// `calls` calls of the generator, from this group of the tensor on. Word k of every call is stored apart, so that one
// vector holds the same word of several calls and the generator, most of the work, is vectorised.
AK_SIMD_CLONES void random_span(uint16_t* __restrict random, int64_t calls, const RandomKey key, uint64_t first) {
  uint32_t words[4][kTile / 8];
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits =
        rounding_bits(key.seed, key.step, key.place.index, key.place.group(first + static_cast<uint64_t>(q)));
    words[0][q] = bits.word[0];
    words[1][q] = bits.word[1];
    words[2][q] = bits.word[2];
    words[3][q] = bits.word[3];
  }
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits{{words[0][q], words[1][q], words[2][q], words[3][q]}};
    for (int lane = 0; lane < 8; ++lane) random[8 * q + lane] = static_cast<uint16_t>(random16(bits, lane, 0));
  }
}

#if AK_X86
// Eight calls in a vector, each word in the lower half of a lane of 64 bits, where the products are: six instructions a
// round. The upper halves are never used. A round waits 7 cycles for its own results, so four vectors take turns.
// Writes whole vectors of each.
__attribute__((target("avx512f"))) void random_avx512(uint16_t* random, int64_t calls, const RandomKey& key,
                                                      uint64_t first) {
  constexpr int kVectors = 4;
  static_assert(kTile % (64 * kVectors) == 0);
  constexpr auto kUpper = static_cast<_MM_PERM_ENUM>(0xf5), kToUpper = static_cast<_MM_PERM_ENUM>(0xa0);
  PhiloxKeys keys(key.seed);
  asm("" : "+m"(keys));  // from memory a broadcast costs no instruction, from a register one that is slow
  const RandomPlace& place = key.place;
  const __m128i to_rows = _mm_cvtsi32_si128(static_cast<int>(32 + place.shift));
  const auto all = [](uint64_t x)
                       __attribute__((target("avx512f"))) { return _mm512_set1_epi64(static_cast<int64_t>(x)); };
  const __m512i factor0 = _mm512_set1_epi64(0xD2511F53u), factor1 = _mm512_set1_epi64(0xCD9E8D57u);
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // two vectors of whole calls are unpacked from it
  for (int64_t q = 0; q < calls; q += 8 * kVectors) {
    __m512i c[kVectors][4];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512i call = _mm512_add_epi64(all(first + static_cast<uint64_t>(q + 8 * v)), order);
      const __m512i row = _mm512_srl_epi64(_mm512_mul_epu32(call, all(place.reciprocal)), to_rows);
      c[v][0] = _mm512_add_epi64(_mm512_add_epi64(call, all(place.first)), _mm512_mul_epu32(row, all(place.gap)));
      c[v][1] = _mm512_srli_epi64(c[v][0], 32);
      c[v][2] = all(place.index);
      c[v][3] = _mm512_set1_epi64(key.step);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m512i key0 = _mm512_set1_epi32(static_cast<int>(keys.word[2 * round])),
                    key1 = _mm512_set1_epi32(static_cast<int>(keys.word[2 * round + 1]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        constexpr int kXorOfThree = 0x96;
        const __m512i product0 = _mm512_mul_epu32(c[v][0], factor0), product1 = _mm512_mul_epu32(c[v][2], factor1);
        c[v][0] = _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(product1, kUpper), c[v][1], key0, kXorOfThree);
        c[v][2] = _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(product0, kUpper), c[v][3], key1, kXorOfThree);
        c[v][1] = product1;
        c[v][3] = product0;
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512i low = _mm512_mask_shuffle_epi32(c[v][0], 0xaaaa, c[v][1], kToUpper),
                    high = _mm512_mask_shuffle_epi32(c[v][2], 0xaaaa, c[v][3], kToUpper);
      _mm512_storeu_si512(random + 8 * (q + 8 * v), _mm512_unpacklo_epi64(low, high));
      _mm512_storeu_si512(random + 8 * (q + 8 * v) + 32, _mm512_unpackhi_epi64(low, high));
    }
  }
}
// Four calls in a vector, in the same way: eight instructions a round. Two vectors are all that 16 registers hold.
__attribute__((target("avx2"))) void random_avx2(uint16_t* random, int64_t calls, const RandomKey& key,
                                                 uint64_t first) {
  constexpr int kVectors = 2;
  static_assert(kTile % (32 * kVectors) == 0);
  PhiloxKeys keys(key.seed);
  asm("" : "+m"(keys));
  const RandomPlace& place = key.place;
  const __m128i to_rows = _mm_cvtsi32_si128(static_cast<int>(32 + place.shift));
  const auto all = [](uint64_t x)
                       __attribute__((target("avx2"))) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); };
  const __m256i factor0 = _mm256_set1_epi64x(0xD2511F53u), factor1 = _mm256_set1_epi64x(0xCD9E8D57u);
  const __m256i order = _mm256_setr_epi64x(0, 2, 1, 3);
  for (int64_t q = 0; q < calls; q += 4 * kVectors) {
    __m256i c[kVectors][4];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const __m256i call = _mm256_add_epi64(all(first + static_cast<uint64_t>(q + 4 * v)), order);
      const __m256i row = _mm256_srl_epi64(_mm256_mul_epu32(call, all(place.reciprocal)), to_rows);
      c[v][0] = _mm256_add_epi64(_mm256_add_epi64(call, all(place.first)), _mm256_mul_epu32(row, all(place.gap)));
      c[v][1] = _mm256_srli_epi64(c[v][0], 32);
      c[v][2] = all(place.index);
      c[v][3] = all(key.step);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m256i key0 = _mm256_set1_epi32(static_cast<int>(keys.word[2 * round])),
                    key1 = _mm256_set1_epi32(static_cast<int>(keys.word[2 * round + 1]));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m256i product0 = _mm256_mul_epu32(c[v][0], factor0), product1 = _mm256_mul_epu32(c[v][2], factor1);
        c[v][0] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), _mm256_xor_si256(c[v][1], key0));
        c[v][2] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), _mm256_xor_si256(c[v][3], key1));
        c[v][1] = product1;
        c[v][3] = product0;
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const __m256i low = _mm256_blend_epi32(c[v][0], _mm256_slli_epi64(c[v][1], 32), 0xaa),
                    high = _mm256_blend_epi32(c[v][2], _mm256_slli_epi64(c[v][3], 32), 0xaa);
      const auto to = reinterpret_cast<__m256i*>(random + 8 * (q + 4 * v));
      _mm256_storeu_si256(to, _mm256_unpacklo_epi64(low, high));
      _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(low, high));
    }
  }
}
#endif

// The numbers of another value: the words of each call change places.
template <int kValue>
AK_SIMD_CLONES void deal_span(const uint16_t* __restrict from, uint16_t* __restrict to, int64_t calls) {
  for (int64_t q = 0; q < calls; ++q) {
    for (int lane = 0; lane < 8; ++lane) to[8 * q + lane] = from[8 * q + (lane ^ 2 * kValue)];
  }
}

template <typename T>
AK_SIMD_CLONES void round_stochastic_span(const float* __restrict from, const uint16_t* __restrict random,
                                          T* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i].bits = round_stochastic<T>(from[i], random[i]).bits;
}

// Writes whole calls, as many vectors of them as it takes.
void draw(uint16_t* random, int64_t at, int64_t n, const RandomKey& key) {
  const uint64_t first = static_cast<uint64_t>(at) / 8;
#if AK_X86
  if (vector_bits() == 512) return random_avx512(random, (n + 7) / 8, key, first);
  if (vector_bits() == 256) return random_avx2(random, (n + 7) / 8, key, first);
#endif
  random_span(random, (n + 7) / 8, key, first);
}

}  // namespace

const uint16_t* TileNumbers::of(int value, int64_t first, int64_t n) {
  if (!drawn_) draw(of_weight_, at_, n_, key_);
  drawn_ = true;
  if (value == 0) return of_weight_ + first;
  constexpr decltype(&deal_span<1>) kDeal[] = {deal_span<1>, deal_span<2>, deal_span<3>};
  kDeal[value - 1](of_weight_ + first, of_moment_, (n + 7) / 8);
  return of_moment_;
}

void store_stochastic(const float* tile, void* data, DType dtype, int64_t at, int64_t n, TileNumbers& numbers) {
  const uint16_t* random = numbers.of(0);
  if (dtype == DType::kFloat16) {
    round_stochastic_span(tile, random, static_cast<fp16*>(data) + at, n);
  } else {
    round_stochastic_span(tile, random, static_cast<bf16*>(data) + at, n);
  }
}

}  // namespace ak
