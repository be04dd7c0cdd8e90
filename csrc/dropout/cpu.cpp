// dropout on the CPU: reads x (and residual), writes out; most of the work is the generator's. It goes tile by tile, so
// that the random words stay in the L1 cache.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "dropout/call.h"
#include "dropout/cpu_span.h"

namespace ak {

Status dropout(const Dropout& call, Stream) {
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const int64_t tiles = (call.count + kTile - 1) / kTile;
  torch::stable::parallel_for(0, tiles, kGrain / kTile, [&](int64_t begin, int64_t end) {
    alignas(64) float x_tile[kTile], added_tile[kTile];
    for (int64_t at = begin * kTile; at < std::min(call.count, end * kTile); at += kTile) {
      const int64_t n = std::min(kTile, call.count - at);
      const float* x = load_tile(call.x, call.x_type, at, n, x_tile);
      const float* added = call.residual ? load_tile(call.residual, call.residual_type, at, n, added_tile) : nullptr;
      float* result = call.out_type == DType::kFloat32 ? static_cast<float*>(call.out) + at : x_tile;
      drop_span(x, at, n, seed, call.rate, added, result);
      store_tile(result, call.out, call.out_type, at, n);
    }
  });
  return {};
}

}  // namespace ak
