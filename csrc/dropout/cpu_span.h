// Dropout of a contiguous span of a tensor on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/cpu/tile.h"
#include "dropout/formula.h"

namespace ak {

// Words of elements [at, at + n), n at most kTile and `at` a multiple of kDropoutGroup. The four words of the calls of
// Philox are first stored apart, so that one vector holds the same word of several calls and the generator, most of the
// work, is vectorised. Writes up to the end of the last group.
AK_SIMD_CLONES inline void dropout_words(uint32_t* __restrict words, int64_t at, int64_t n, uint64_t seed) {
  uint32_t apart[kDropoutGroup][kTile / kDropoutGroup];
  const int64_t calls = (n + kDropoutGroup - 1) / kDropoutGroup;
  const uint64_t group = static_cast<uint64_t>(at / kDropoutGroup);
  for (int64_t q = 0; q < calls; ++q) {
    const Philox4 bits = dropout_bits(seed, group + static_cast<uint64_t>(q));
    apart[0][q] = bits.word[0];
    apart[1][q] = bits.word[1];
    apart[2][q] = bits.word[2];
    apart[3][q] = bits.word[3];
  }
  for (int64_t q = 0; q < calls; ++q) {
    for (int k = 0; k < kDropoutGroup; ++k) words[kDropoutGroup * q + k] = apart[k][q];
  }
}

AK_SIMD_CLONES inline void drop_tile(const float* x, const uint32_t* words, DropoutRate rate, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = dropped_out(x[i], words[i], rate);
}

AK_SIMD_CLONES inline void drop_and_add_tile(const float* x, const uint32_t* words, DropoutRate rate,
                                             const float* added, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = dropped_out(x[i], words[i], rate) + added[i];
}

// out = dropout(x) + added of n elements, the first of which is element `at` of the tensor. `added` may be null; `out`
// may alias either.
inline void drop_span(const float* x, int64_t at, int64_t n, uint64_t seed, DropoutRate rate, const float* added,
                      float* out) {
  alignas(64) uint32_t words[kTile];
  for (int64_t done = 0; done < n;) {
    const int64_t lead = (at + done) % kDropoutGroup, count = std::min(kTile - lead, n - done);
    dropout_words(words, at + done - lead, lead + count, seed);
    if (added) {
      drop_and_add_tile(x + done, words + lead, rate, added + done, out + done, count);
    } else {
      drop_tile(x + done, words + lead, rate, out + done, count);
    }
    done += count;
  }
}

}  // namespace ak
