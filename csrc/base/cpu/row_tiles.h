// How kernels go over rows: short ones some together, long ones a tile at a time.
//
// Short rows are worked on several together, for what a row costs whatever its length (calls, a logarithm, a division)
// to be paid once for all of them, or in the lanes of a vector. A row's bits are its own all the same.
#pragma once

#include <algorithm>

#include "base/cpu/tile.h"

namespace ak {

inline constexpr int64_t kRowsTogether = 16;
inline int64_t rows_together(int64_t columns) { return std::clamp<int64_t>(kTile / columns, 1, kRowsTogether); }

// A number for each row of a block. Loops over all of them, those without a row too, are vectors.
using PerRow = float[kRowsTogether];

// Calls each(first, count) for the tiles of a row.
template <typename Each>
void for_tiles(int64_t n, const Each& each) {
  for (int64_t c = 0; c < n; c += kTile) each(c, std::min(kTile, n - c));
}

// make(to, c, count) for the tiles of a row of the result at `out`, `row` its first element.
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
