// norm_forward on the CPU.
//
// Work: reads x (and residual), writes y (and s). Short rows are batched, in passes for mean, mean square and result,
// 16-bit ones widened into a buffer first. A row longer than a tile passes through the L1 cache tile by tile, once a
// pass. Rows are independent, so the result has the same bits for any number of threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/cpu/chunks.h"
#include "base/cpu/row_sums.h"
#include "base/cpu/row_tiles.h"
#include "base/cpu/tile.h"
#include "norm/call.h"
#include "norm/formula.h"

namespace ak {
namespace {

// The sum of the squares around `mean` of a row times `factor`, which is kShrink if the squares overflow, else 1.
// `ahead(i)` may prefetch other data on the way.
template <typename Floats, typename Ahead>
AK_SIMD_INLINE float sum_of_squares(const float* x, float factor, float mean, int64_t n, const Ahead& ahead) {
  const auto square = [=](float v) AK_ALWAYS_INLINE {
    const float centred = v * factor - mean;
    return centred * centred;
  };
  return sum_of_lanes<Floats>(
      n, [=](int64_t i, Floats& t) AK_ALWAYS_INLINE { load_floats(x + i, t), t = of_lanes(square, t), ahead(i); },
      [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, square, x); });
}
template <typename Floats>
AK_SIMD_INLINE float sum_of_numbers(const float* x, float factor, int64_t n) {
  const auto number = [=](float v) AK_ALWAYS_INLINE { return v * factor; };
  return sum_of_lanes<Floats>(
      n,
      [=](int64_t i, Floats& t)
          AK_ALWAYS_INLINE { load_floats(x + i, t), t = of_lanes(number, t), prefetch_ahead(x + i); },
      [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, number, x); });
}
AK_SIMD_INLINE auto normalization(float mean, float rstd) {
  return [=](float v, float w, float b)
             AK_ALWAYS_INLINE { return scaled_and_shifted(normalized(v, mean, rstd), w, b); };
}

// ---- rows of at most a tile

// Mean and reciprocal deviation of at most kRowsTogether rows. Returns whether all mean squares are finite. The pass
// for the squares finds the rows in the L1 cache and prefetches the lines of the result.
template <bool kCentred, typename Y>
bool statistics_of_rows(const float* x, int64_t rows, int64_t n, float eps, float factor, const Y* y, float* mean,
                        float* rstd) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    const float count = static_cast<float>(n);
    PerRow means = {}, squares = {};
    if (kCentred) {
      for (int64_t r = 0; r < rows; ++r) means[r] = sum_of_numbers<Floats>(x + r * n, factor, n);
      for (int64_t r = 0; r < kRowsTogether; ++r) means[r] /= count;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const auto of_result = [=](int64_t i) AK_ALWAYS_INLINE { __builtin_prefetch(y + r * n + i, /*rw=*/1); };
      squares[r] = sum_of_squares<Floats>(x + r * n, factor, means[r], n, of_result);
    }
    uint32_t infinite = 0;
    PerRow deviations;
    for (int64_t r = 0; r < kRowsTogether; ++r) {
      const float square = squares[r] / count;
      infinite |= is_finite(square) ? 0u : 1u;
      means[r] = unshrunk_mean(means[r], factor);
      deviations[r] = reciprocal_deviation(square, eps, factor);
    }
    if (kCentred) std::copy_n(means, rows, mean);
    std::copy_n(deviations, rows, rstd);
    return infinite == 0;
  });
}

template <bool kCentred>
AK_SIMD_CLONES void normalize_rows(const float* x, int64_t rows, int64_t n, const float* mean, const float* rstd,
                                   const float* weight, const float* bias, float* y) {
  for (int64_t r = 0; r < rows; ++r)
    map_lanes(n, y + r * n, normalization(kCentred ? mean[r] : 0.0f, rstd[r]), x + r * n, weight, bias);
}

// The rows [first, first + rows), which begin at x; `buffer` may alias them.
template <bool kCentred, typename Y>
void norm_of_rows(const NormForward& call, const float* weight, const float* bias, const float* x, int64_t first,
                  int64_t rows, float* buffer) {
  const int64_t n = call.columns;
  float *const mean = kCentred ? call.mean + first : nullptr, *const rstd = call.rstd + first;
  Y* const y = static_cast<Y*>(call.y) + first * n;
  const auto measure = [&](int64_t r, int64_t count, float factor) {
    float* const own_mean = kCentred ? mean + r : nullptr;
    return statistics_of_rows<kCentred>(x + r * n, count, n, call.eps, factor, y + r * n, own_mean, rstd + r);
  };
  if (!measure(0, rows, 1.0f)) [[unlikely]] {
    for (int64_t r = 0; r < rows; ++r) {  // a finite row keeps the bits that it has alone
      if (!measure(r, 1, 1.0f)) measure(r, 1, kShrink);
    }
  }
  make_rounded(y, buffer, rows * n,
               [&](float* to) { normalize_rows<kCentred>(x, rows, n, mean, rstd, weight, bias, to); });
}

// ---- rows longer than a tile

float numbers_span(const float* x, float factor, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE { return sum_of_numbers<Floats>(x, factor, n); });
}
float squares_span(const float* x, float factor, float mean, int64_t n) {
  return with_lanes([=]<typename Floats>()
                        AK_ALWAYS_INLINE { return sum_of_squares<Floats>(x, factor, mean, n, [](int64_t) {}); });
}
// A row may be far longer than the L1 cache, so the lines of x and y are prefetched.
AK_SIMD_CLONES void normalize_span(const float* x, float mean, float rstd, const float* weight, const float* bias,
                                   float* y, int64_t n) {
  const auto lines = [=](int64_t i) AK_ALWAYS_INLINE {
    prefetch_ahead(x + i), prefetch_ahead(x + i + kFloats);
    prefetch_ahead</*kWrites=*/true>(y + i), prefetch_ahead</*kWrites=*/true>(y + i + kFloats);
  };
  map_lanes_ahead(n, lines, y, normalization(mean, rstd), x, weight, bias);
}

// Row r of x of `dtype`.
void norm_of_long_row(const NormForward& call, const float* weight, const float* bias, const void* x, DType dtype,
                      int64_t r) {
  const int64_t n = call.columns, row = r * n;
  alignas(64) float tile[kTile];
  const auto load = [&](int64_t c, int64_t some) { return load_tile(x, dtype, row + c, some, tile); };
  const auto moments_of_row = [&](float factor) {
    RowMoments<double> all;
    for (int64_t begin = 0; begin < n; begin += kRowChain) {
      RowMoments<float> chain;
      for_tiles(std::min(kRowChain, n - begin), [&](int64_t c, int64_t some) {
        const float* const values = load(begin + c, some);
        const float count = static_cast<float>(some);
        const float mean = call.mean ? numbers_span(values, factor, some) / count : 0.0f;
        chain = joined(chain, {count, mean, squares_span(values, factor, mean, some)});
      });
      all = joined(all, {chain.count, chain.mean, chain.squares});
    }
    return std::pair(static_cast<float>(all.mean), static_cast<float>(all.squares / all.count));
  };
  float factor = 1.0f;
  auto [row_mean, square] = moments_of_row(factor);
  if (!is_finite(square)) std::tie(row_mean, square) = moments_of_row(factor = kShrink);
  const float mean = unshrunk_mean(row_mean, factor);
  const float rstd = reciprocal_deviation(square, call.eps, factor);
  if (call.mean) call.mean[r] = mean;
  call.rstd[r] = rstd;
  make_tiles(call.y, call.y_type, row, n, tile, [&](float* y, int64_t c, int64_t some) {
    normalize_span(load(c, some), mean, rstd, weight + c, bias + c, y, some);
  });
}

// ---- the addition in front

// `sum` may alias y.
AK_SIMD_CLONES void add_spans(const float* x, const float* y, float* sum, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

// The elements [at, at + n) of the sum, n at most a tile.
void add_tile(const NormForward& call, int64_t at, int64_t n) {
  alignas(64) float x_tile[kTile], sum_tile[kTile];
  const float* const x = load_tile(call.x, call.x_type, at, n, x_tile);
  const float* const addend = load_tile(call.residual, call.residual_type, at, n, sum_tile);
  float* const sum = call.residual_type == DType::kFloat32 ? static_cast<float*>(call.sum) + at : sum_tile;
  add_spans(x, addend, sum, n);
  store_tile(sum, call.sum, call.residual_type, at, n);
}

}  // namespace

AK_EXPORT Status norm_forward(const NormForward& call, Stream) {
  const int64_t n = call.columns, block = rows_together(n);
  RowBuffer weight_buffer(n), bias_buffer(n);
  const float* const weight = values_or(call.weight, call.weight_type, 1.0f, n, weight_buffer.get());
  const float* const bias = values_or(call.bias, call.bias_type, 0.0f, n, bias_buffer.get());
  const void* const x = call.residual ? call.sum : call.x;
  const DType dtype = call.residual ? call.residual_type : call.x_type;
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    for (int64_t first = begin; first < end; first += block) {
      const int64_t rows = std::min(block, end - first), at = first * n;
      if (call.residual) for_tiles(rows * n, [&](int64_t c, int64_t count) { add_tile(call, at + c, count); });
      if (n > kTile) {
        norm_of_long_row(call, weight, bias, x, dtype, first);
        continue;
      }
      const float* const values = load_tile(x, dtype, at, rows * n, buffer);
      with_narrow_dtype(call.y_type, [&]<typename Y>(Y) {
        const auto norm_rows = call.mean ? norm_of_rows<true, Y> : norm_of_rows<false, Y>;
        norm_rows(call, weight, bias, values, first, rows, buffer);
      });
    }
  });
  return {};
}

}  // namespace ak
