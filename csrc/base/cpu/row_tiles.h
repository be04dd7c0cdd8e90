// Short rows are batched; long rows are tiled.
//
// Batching shares the fixed cost of a row (calls, a logarithm, a division) or vectorizes it. A row's bits do not depend
// on its batch.
#pragma once

#include <algorithm>

#include "base/cpu/tile.h"

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
