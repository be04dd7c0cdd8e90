// spread_rows and combine_rows on the CPU. Threads share the tokens, so the bits do not depend on their number.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/row_sums.h"
#include "routing/call.h"

namespace ak {
namespace {

AK_SIMD_CLONES void scale_span(const float* __restrict x, float weight, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = weight * x[i];
}

AK_SIMD_CLONES void add_span(const float* __restrict y, float weight, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * y[i];
}

float* result_tile(void* out, DType type, int64_t at, float* tile) {
  return type == DType::kFloat32 ? static_cast<float*>(out) + at : tile;
}

// Calls f(token, first column, columns) for the tiles of all rows.
template <typename F>
void for_each_tile(const Routes& r, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, r.columns * (r.top_k + 1)));
  torch::stable::parallel_for(0, r.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t c = 0; c < r.columns; c += kTile) f(token, c, std::min(kTile, r.columns - c));
    }
  });
}

// Calls f(number of the choice, place, weight) for the choices of a token.
template <typename F>
void for_each_choice(const Routes& r, int64_t token, const F& f) {
  for (int64_t choice = token * r.top_k; choice < (token + 1) * r.top_k; ++choice) {
    const int64_t place = r.places[choice];
    if (place >= 0 && place < r.rows()) f(choice, place, r.weights ? r.weights[choice] : 1.0f);
  }
}

}  // namespace

Status spread_rows(const SpreadRows& p, Stream) {
  const Routes& r = p.routes;
  if (p.dots) std::fill_n(p.dots, r.rows(), 0.0f);
  for_each_tile(r, [&](int64_t token, int64_t c, int64_t n) {
    alignas(64) float x_tile[kTile], tile[kTile];
    const float* x = load_tile(p.x, p.x_type, token * r.columns + c, n, x_tile);
    for_each_choice(r, token, [&](int64_t choice, int64_t place, float weight) {
      const int64_t at = place * r.columns + c;
      if (p.dots) p.dots[choice] += products_span(load_tile(p.y, p.out_type, at, n, tile), x, n);
      float* const out = result_tile(p.out, p.out_type, at, tile);
      scale_span(x, weight, out, n);
      store_tile(out, p.out, p.out_type, at, n);
    });
  });
  return {};
}

Status combine_rows(const CombineRows& p, Stream) {
  const Routes& r = p.routes;
  for_each_tile(r, [&](int64_t token, int64_t c, int64_t n) {
    alignas(64) float y_tile[kTile], sums[kTile];
    const int64_t at = token * r.columns + c;
    float* const out = result_tile(p.out, p.out_type, at, sums);
    std::fill_n(out, n, 0.0f);
    for_each_choice(r, token, [&](int64_t, int64_t place, float weight) {
      add_span(load_tile(p.y, p.y_type, place * r.columns + c, n, y_tile), weight, out, n);
    });
    store_tile(out, p.out, p.out_type, at, n);
  });
  return {};
}

}  // namespace ak
