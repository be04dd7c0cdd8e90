// Moments of the update ops on the CPU: fp32, bf16, or 8-bit codes (base/block8.h).
#pragma once

#include "base/cpu/stochastic.h"
#include "update/rule.h"
#include "update/update.h"

namespace ak {

// Elements [at, at + n) of moment k: in place if it is stored in fp32, else in `buffer`. `at` is a multiple of 32.
float* load_moment(const Param& p, int k, bool is_unsigned, int64_t at, int64_t n, float* buffer);

// Writes them, rounded: from a tile's element `first` on, whose numbers are given. fp32 moments have been changed in
// place.
void store_moment(const Param& p, int k, bool is_unsigned, const float* values, int64_t at, int64_t n, int64_t first,
                  TileNumbers& numbers);

// The moments of a tile or a part of it, as floats; null if absent.
template <typename Rule>
class TileMoments {
 public:
  void load(const Param& p, int64_t at, int64_t n) {
    for (int k = 0; k < Rule::kMoments; ++k) {
      of[k] = p.moments[k] ? load_moment(p, k, is_unsigned<Rule>(k), at, n, buffers_[k]) : nullptr;
    }
  }
  // `first`: the place of element `at` in the tile of `numbers`.
  void store(const Param& p, int64_t at, int64_t n, int64_t first, TileNumbers& numbers) const {
    for (int k = 0; k < Rule::kMoments; ++k) {
      if (of[k]) store_moment(p, k, is_unsigned<Rule>(k), of[k], at, n, first, numbers);
    }
  }

  float* of[Rule::kMoments] = {};

 private:
  alignas(64) float buffers_[Rule::kMoments][kTile];
};

}  // namespace ak
