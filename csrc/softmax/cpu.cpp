// softmax_rows and softmax_rows_backward on the CPU. Short rows are batched and widened into a buffer, in which the
// passes for maximum, sum and result find them. A row longer than a tile passes through the L1 cache tile by tile, once
// a pass: widening its 16-bit values again moves half the bytes of a widened copy. Rows are independent, so the bits
// are the same for any number of threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/row_tiles.h"
#include "base/cpu/tile.h"
#include "softmax/call.h"
#include "softmax/cpu_exp_sums.h"
#include "softmax/formula.h"

namespace ak {
namespace {

// `to` may alias x.
AK_SIMD_CLONES void mask_span(const uint8_t* counts, float instead, const float* x, float* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = counts[i] ? x[i] : instead;
}

template <bool kLog>
AK_SIMD_INLINE void softmax_result_row(const float* from, SoftmaxRow row, float* to, int64_t n) {
  const auto result = [=](float v)
                          __attribute__((always_inline)) { return kLog ? log_softmax_of(row, v) : softmax_of(row, v); };
  map_lanes(n, to, result, from);
}

// At most kRowsTogether rows. `e` may alias x, and y may alias e. Log-softmax also writes base and inverse of each row.
template <bool kLog>
void softmax_of_rows(const float* x, float* e, float* y, int64_t rows, int64_t n, bool safe, float* bases,
                     float* inverses) {
  with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    PerRow largest = {}, sums = {}, base, inverse, log_sum;
    const auto largest_of = [&](int64_t r) AK_ALWAYS_INLINE { return largest_lanes<Floats>(x + r * n, n); };
    join_rows(rows, largest, largest_of, Larger{});
    for (int64_t r = 0; r < kRowsTogether; ++r) base[r] = softmax_base(largest[r]);
    const auto exp_of = [&](int64_t r)
                            AK_ALWAYS_INLINE { return exp_lanes<!kLog, Floats>(x + r * n, base[r], e + r * n, n); };
    join_rows(rows, sums, exp_of, Add{});
    for (int64_t r = 0; r < kRowsTogether; ++r) {
      const SoftmaxRow row = softmax_row(largest[r], sums[r] * kExpUnscale, safe);
      inverse[r] = row.inverse;
      log_sum[r] = row.log_sum;
    }
    for (int64_t r = 0; r < rows; ++r) {
      softmax_result_row<kLog>((kLog ? x : e) + r * n, {base[r], inverse[r], log_sum[r]}, y + r * n, n);
    }
    if (kLog) {
      std::copy_n(base, rows, bases);
      std::copy_n(inverse, rows, inverses);
    }
  });
}

template <typename T>
AK_SIMD_CLONES void copy_span(const float* from, T* to, int64_t n) {
  round_span(from, to, n);
}

template <typename T>
AK_SIMD_INLINE void softmax_gradient_row(const T* y, const T* g, float sum, float* out, int64_t n) {
  const auto gradient = [=](float own, float grad)
                            __attribute__((always_inline)) { return softmax_gradient(own, grad, sum); };
  map_lanes(n, out, gradient, y, g);
}
template <typename T>
AK_SIMD_INLINE void log_softmax_gradient_row(const T* x, const T* g, float base, float inverse, float sum, float* out,
                                             int64_t n) {
  const auto gradient = [=](float v, float grad) __attribute__((always_inline)) {
    return log_softmax_gradient(exp_of_logit(v - base) * inverse, grad, sum);
  };
  map_lanes(n, out, gradient, x, g);
}
// The gradients of at most kRowsTogether rows; the operands are floats or bf16, and `out` may alias one of them. While
// the sums are formed, the lines of the gradients are prefetched.
template <typename T>
void softmax_gradient_rows(const T* y, const T* g, float* out, int64_t rows, int64_t n) {
  with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    PerRow sums;
    for (int64_t r = 0; r < rows; ++r) {
      const auto of_result = [=](int64_t i) AK_ALWAYS_INLINE { prefetch_ahead</*kWrites=*/true>(out + r * n + i); };
      sums[r] = sum_of_products<Floats>(y + r * n, g + r * n, n, of_result);
    }
    for (int64_t r = 0; r < rows; ++r) softmax_gradient_row(y + r * n, g + r * n, sums[r], out + r * n, n);
  });
}
template <typename T>
void log_softmax_gradient_rows(const T* x, const T* g, const float* bases, const float* inverses, float* out,
                               int64_t rows, int64_t n) {
  with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    PerRow sums;
    for (int64_t r = 0; r < rows; ++r) {
      const auto of_both = [=](int64_t i) AK_ALWAYS_INLINE {
        prefetch_ahead(x + r * n + i), prefetch_ahead<true>(out + r * n + i);
      };
      sums[r] = sum_of_row<Floats>(g + r * n, n, of_both);
    }
    for (int64_t r = 0; r < rows; ++r)
      log_softmax_gradient_row(x + r * n, g + r * n, bases[r], inverses[r], sums[r], out + r * n, n);
  });
}

// ---- rows longer than a tile

float largest_of_span(const float* x, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE { return largest_of_row<Floats>(x, n); });
}
template <bool kKeeps>
float exp_span(const float* x, float base, float* e, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE { return exp_row<kKeeps, Floats>(x, base, e, n); });
}
template <bool kLog>
AK_SIMD_CLONES void softmax_span(const float* from, SoftmaxRow row, float* to, int64_t n) {
  softmax_result_row<kLog>(from, row, to, n);
}
template <typename T>
AK_SIMD_CLONES void gradient_span(const T* y, const T* g, float sum, float* to, int64_t n) {
  softmax_gradient_row(y, g, sum, to, n);
}
template <typename T>
AK_SIMD_CLONES void log_gradient_span(const T* x, const T* g, float base, float inverse, float sum, float* to,
                                      int64_t n) {
  log_softmax_gradient_row(x, g, base, inverse, sum, to, n);
}

// `exponentials`: a buffer for those of a row; log-softmax needs none.
void softmax_of_long_row(const SoftmaxRows& call, int64_t r, float* exponentials) {
  const int64_t n = call.columns, row = r * n;
  alignas(64) float tile[kTile];
  const uint8_t* const counts = call.mask.data ? call.mask.row(r) : nullptr;
  const auto load = [&](int64_t c, int64_t count) -> const float* {
    const float* x = load_tile(call.x, call.x_type, row + c, count, tile);
    if (!counts) return x;
    mask_span(counts + c, kMasked, x, tile, count);
    return tile;
  };
  float largest = kMasked;
  TileSums sum;
  for_tiles(n, [&](int64_t c, int64_t count) { largest = std::max(largest, largest_of_span(load(c, count), count)); });
  const float base = softmax_base(largest);
  for_tiles(n, [&](int64_t c, int64_t count) {
    const float* x = load(c, count);
    sum.add(call.statistics ? exp_span<false>(x, base, nullptr, count)
                            : exp_span<true>(x, base, exponentials + c, count));
  });
  const SoftmaxRow of = softmax_row(largest, sum.total(), call.safe);
  make_tiles(call.y, call.y_type, row, n, tile, [&](float* to, int64_t c, int64_t count) {
    if (call.statistics) return softmax_span<true>(load(c, count), of, to, count);
    softmax_span<false>(exponentials + c, of, to, count);
  });
  if (call.statistics) call.statistics[r] = of.base, call.statistics[call.rows + r] = of.inverse;
}

// T: bf16 if both operands are bf16, which is read directly; else float, to which others are widened.
template <typename T>
void softmax_gradient_of_long_row(const SoftmaxRowsBackward& call, int64_t r) {
  const int64_t n = call.columns, row = r * n;
  alignas(64) float of_tile[kTile], grad_tile[kTile];
  const auto load = [&](const void* data, DType dtype, int64_t c, int64_t count, float* tile) -> const T* {
    if constexpr (std::is_same_v<T, float>) return load_tile(data, dtype, row + c, count, tile);
    return static_cast<const T*>(data) + row + c;
  };
  const auto load_of = [&](int64_t c, int64_t count) { return load(call.of, call.of_type, c, count, of_tile); };
  const auto load_grad = [&](int64_t c, int64_t count) { return load(call.grad, call.grad_type, c, count, grad_tile); };
  TileSums sums;
  for_tiles(n, [&](int64_t c, int64_t count) {
    const T* g = load_grad(c, count);
    sums.add(call.statistics ? sum_of_span(g, count) : products_span(load_of(c, count), g, count));
  });
  const float sum = sums.total();
  make_tiles(call.out, call.out_type, row, n, of_tile, [&](float* to, int64_t c, int64_t count) {
    const T *const of = load_of(c, count), *const g = load_grad(c, count);
    if (call.statistics) {
      log_gradient_span(of, g, call.statistics[r], call.statistics[call.rows + r], sum, to, count);
    } else {
      gradient_span(of, g, sum, to, count);
    }
    if (call.mask.data) mask_span(call.mask.row(r) + c, 0.0f, to, to, count);
  });
}

}  // namespace

AK_EXPORT Status softmax_rows(const SoftmaxRows& call, Stream) {
  const int64_t n = call.columns, block = rows_together(n);
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    if (n > kTile) {
      RowBuffer exponentials(call.statistics ? 0 : n);
      for (int64_t r = begin; r < end; ++r) softmax_of_long_row(call, r, exponentials.get());
      return;
    }
    RowBuffer values(block * n), exponentials(block * n);
    for (int64_t first = begin; first < end; first += block) {
      const int64_t rows = std::min(block, end - first), numel = rows * n;
      const float* x = load_tile(call.x, call.x_type, first * n, numel, values.get());
      if (call.mask.data) {
        for (int64_t r = 0; r < rows; ++r)
          mask_span(call.mask.row(first + r), kMasked, x + r * n, values.get() + r * n, n);
        x = values.get();
      }
      with_narrow_dtype(call.y_type, [&]<typename T>(T) {
        make_rounded(static_cast<T*>(call.y) + first * n, exponentials.get(), numel, [&](float* at) {
          if (call.statistics) {
            float *const bases = call.statistics + first, *const inverses = bases + call.rows;
            softmax_of_rows<true>(x, exponentials.get(), at, rows, n, call.safe, bases, inverses);
          } else {
            softmax_of_rows<false>(x, exponentials.get(), at, rows, n, call.safe, nullptr, nullptr);
          }
        });
      });
    }
  });
  return {};
}

AK_EXPORT Status softmax_rows_backward(const SoftmaxRowsBackward& call, Stream) {
  const int64_t n = call.columns, block = rows_together(n);
  const bool direct = call.grad_type == DType::kBFloat16 && call.of_type == call.grad_type;  // bf16 is read directly
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    if (n > kTile) {
      const auto long_row = direct ? softmax_gradient_of_long_row<bf16> : softmax_gradient_of_long_row<float>;
      for (int64_t r = begin; r < end; ++r) long_row(call, r);
      return;
    }
    RowBuffer values(block * n), gradients(block * n);
    const auto rows_of = [&](const auto* y, const auto* g, int64_t first, int64_t rows) {
      const auto make = [&](float* at) {
        if (call.statistics) {
          const float *const bases = call.statistics + first, *const inverses = bases + call.rows;
          log_softmax_gradient_rows(y, g, bases, inverses, at, rows, n);
        } else {
          softmax_gradient_rows(y, g, at, rows, n);
        }
      };
      with_narrow_dtype(call.out_type, [&]<typename T>(T) {
        T* const at = static_cast<T*>(call.out) + first * n;
        if (call.mask.data) {
          float* const made = values.get();
          make(made);
          for (int64_t r = 0; r < rows; ++r) mask_span(call.mask.row(first + r), 0.0f, made + r * n, made + r * n, n);
          copy_span(made, at, rows * n);
        } else {
          make_rounded(at, values.get(), rows * n, make);
        }
      });
    };
    for (int64_t first = begin; first < end; first += block) {
      const int64_t rows = std::min(block, end - first), at = first * n;
      if (direct) {
        rows_of(static_cast<const bf16*>(call.of) + at, static_cast<const bf16*>(call.grad) + at, first, rows);
      } else {
        rows_of(load_tile(call.of, call.of_type, at, rows * n, values.get()),
                load_tile(call.grad, call.grad_type, at, rows * n, gradients.get()), first, rows);
      }
    }
  });
  return {};
}

}  // namespace ak
