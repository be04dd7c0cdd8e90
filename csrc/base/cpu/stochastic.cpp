#include "base/cpu/stochastic.h"

#include "base/cpu/isa.h"
#include "base/philox.h"
#include "base/rounding.h"

#if AK_X86
#include <immintrin.h>
#endif

namespace ak {
namespace {

// `calls` calls of the generator, from this group of the tensor on. Word k of every call is stored apart, so that one vector holds
// the same word of several calls and the generator, most of the work, is vectorised.
AK_SIMD_CLONES void random_span(uint16_t* __restrict random, int64_t calls, const RandomKey key, uint64_t first) {
  uint32_t words[4][kTile / 8];
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits = rounding_bits(key.seed, key.step, key.place.index, key.place.group(first + static_cast<uint64_t>(q)));
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
// Eight calls at once, each word in the lower half of a lane of 64 bits, where the products are: six instructions a
// round. The upper halves are never used. Writes whole eights of calls.
__attribute__((target("avx512f"))) void random_avx512(uint16_t* random, int64_t calls, const RandomKey& key,
                                                      uint64_t first_call) {
  const PhiloxKeys keys(key.seed);
  const RandomPlace& place = key.place;
  const __m128i to_rows = _mm_cvtsi32_si128(static_cast<int>(32 + place.shift));
  const auto all = [](uint64_t x)
                       __attribute__((target("avx512f"))) { return _mm512_set1_epi64(static_cast<int64_t>(x)); };
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  for (int64_t q = 0; q < calls; q += 8) {
    const __m512i call =
        _mm512_add_epi64(all(first_call + static_cast<uint64_t>(q)), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    const __m512i row = _mm512_srl_epi64(_mm512_mul_epu32(call, all(place.reciprocal)), to_rows);
    const __m512i groups =
        _mm512_add_epi64(_mm512_add_epi64(all(place.first), call), _mm512_mul_epu32(row, all(place.gap)));
    __m512i c0 = groups, c2 = all(place.index), c3 = all(key.step);
    __m512i c1 = _mm512_srli_epi64(groups, 32);
    for (int round = 0; round < 10; ++round) {
      const __m512i product0 = _mm512_mul_epu32(c0, all(0xD2511F53u)),
                    product1 = _mm512_mul_epu32(c2, all(0xCD9E8D57u));
      constexpr int kXorOfThree = 0x96;
      c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), c1, all(keys.word[2 * round]), kXorOfThree);
      c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3, all(keys.word[2 * round + 1]), kXorOfThree);
      c1 = product1;
      c3 = product0;
    }
    const __m512i low = _mm512_mask_blend_epi32(0xaaaa, c0, _mm512_slli_epi64(c1, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xaaaa, c2, _mm512_slli_epi64(c3, 32));
    _mm512_storeu_si512(random + 8 * q, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(random + 8 * q + 32, _mm512_permutex2var_epi64(low, second, high));
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

// Writes whole calls.
void draw(uint16_t* random, int64_t at, int64_t n, const RandomKey& key) {
  const uint64_t first = static_cast<uint64_t>(at) / 8;
#if AK_X86
  if (vector_bits() == 512) return random_avx512(random, (n + 7) / 8, key, first);
#endif
  random_span(random, (n + 7) / 8, key, first);
}

}  // namespace

const uint16_t* TileNumbers::of(int value) {
  if (!drawn_) draw(of_weight_, at_, n_, key_);
  drawn_ = true;
  if (value == 0) return of_weight_;
  constexpr decltype(&deal_span<1>) kDeal[] = {deal_span<1>, deal_span<2>, deal_span<3>};
  kDeal[value - 1](of_weight_, of_moment_, (n_ + 7) / 8);
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
