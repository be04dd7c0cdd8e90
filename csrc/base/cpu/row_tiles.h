// Short rows are batched; long rows are tiled.
//
// Batching shares the fixed cost of a row (calls, a logarithm, a division) or vectorizes it. A row's bits do not depend
// on its batch.
#pragma once

#include <algorithm>

#include "base/cpu/row_sums.h"

namespace ak {

inline constexpr int64_t kRowsTogether = 16;
inline int64_t rows_together(int64_t columns) { return std::clamp<int64_t>(kTile / columns, 1, kRowsTogether); }

// A value per row of a batch. Loops cover all of them, used or not, so that they vectorize.
using PerRow = float[kRowsTogether];

// Calls each(first, count) for every tile of a row.
template <typename Each>
void for_tiles(int64_t n, const Each& each) {
  for (int64_t c = 0; c < n; c += kTile) each(c, std::min(kTile, n - c));
}

// The sum of a row from those of its tiles in order, in chains as kRowChain says.
class TileSums {
 public:
  explicit TileSums(float first = 0.0f) : chain_(first) {}
  void add(float tile) {
    chain_ += tile;
    if (++tiles_ % (kRowChain / kTile) == 0) total_ += chain_, chain_ = 0.0f;
  }
  float total() const { return static_cast<float>(total_ + chain_); }

 private:
  double total_ = 0.0;
  float chain_;
  int64_t tiles_ = 0;
};

// Calls make(to, c, count) for every tile of the result row that begins at element `row` of `out`.
template <typename Make>
void make_tiles(void* out, DType dtype, int64_t row, int64_t n, float* tile, const Make& make) {
  for_tiles(n, [&](int64_t c, int64_t count) {
    const bool wide = dtype == DType::kFloat32;
    float* const to = wide ? static_cast<float*>(out) + row + c : tile;
    make(to, c, count);
    if (!wide) store_tile(to, out, dtype, row + c, count);
  });
}

}  // namespace ak
