#include "base/cpu/stochastic.h"

#include "base/philox.h"
#include "base/rounding.h"

namespace ak {
namespace {

// Random bits for the elements of a tile, one 16-bit number each. Word k of every Philox call is stored apart, so that
// one vector holds the same word of several calls and the generator, most of the work, is vectorised.
AK_SIMD_CLONES void random_span(uint32_t* __restrict random, int64_t n, const RandomKey key, uint64_t group) {
  uint32_t words[4][kTile / 8];
  const int64_t calls = (n + 7) / 8;
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits = rounding_bits(key.seed, key.step, key.index, group + static_cast<uint64_t>(q), key.stream);
    words[0][q] = bits.word[0];
    words[1][q] = bits.word[1];
    words[2][q] = bits.word[2];
    words[3][q] = bits.word[3];
  }
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits{{words[0][q], words[1][q], words[2][q], words[3][q]}};
    for (int lane = 0; lane < 8; ++lane) random[8 * q + lane] = random16(bits, lane);
  }
}

template <typename T>
AK_SIMD_CLONES void round_stochastic_span(const float* __restrict from, const uint32_t* __restrict random,
                                          T* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i].bits = round_stochastic<T>(from[i], random[i]).bits;
}

}  // namespace

void random_numbers(uint32_t* random, int64_t at, int64_t n, const RandomKey& key) {
  random_span(random, n, key, key.first_group + static_cast<uint64_t>(at) / 8);
}

void store_stochastic(const float* tile, void* data, DType dtype, int64_t at, int64_t n, const RandomKey& key) {
  alignas(64) uint32_t random[kTile];
  random_numbers(random, at, n, key);
  if (dtype == DType::kFloat16) {
    round_stochastic_span(tile, random, static_cast<fp16*>(data) + at, n);
  } else {
    round_stochastic_span(tile, random, static_cast<bf16*>(data) + at, n);
  }
}

}  // namespace ak
