// Philox4x32-10, a counter-based random number generator. Numbers are a pure function of (counter, key), so every
// thread, rank and backend computes the same ones without state. Source: Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011.
#pragma once

#include "base/config.h"

namespace ak {

struct Philox4 {
  uint32_t word[4];
};

AK_HD Philox4 philox4x32_10(Philox4 counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Random bits for stochastic rounding: eight 16-bit numbers per call, for elements 8 * group .. 8 * group + 7 of
// parameter `param` at step `step`. They depend on the element alone, not on who computes it, so sharded and restarted
// runs round identically. Stream 0 is for the weight, stream 1 + k for moment k in 8 bits.
AK_HD Philox4 rounding_bits(uint64_t seed, uint32_t step, uint32_t param, uint64_t group, uint32_t stream = 0) {
  const uint32_t high = static_cast<uint32_t>(group >> 32) | stream << 24;
  return philox4x32_10({{static_cast<uint32_t>(group), high, param, step}}, seed);
}

// Number `lane` (0..7) of the eight.
AK_HD uint32_t random16(const Philox4& bits, int lane) { return (bits.word[lane >> 1] >> (16 * (lane & 1))) & 0xffffu; }

}  // namespace ak
