// cross_entropy_rows_ on the CPU: the losses of rows of logits and, on request, their gradients, which may overwrite
// the logits. A thread takes a row, or several short ones, widened to fp32 in a buffer that fits the L2 cache: the
// logits are read once and each exponential is computed once.
//
// A gradient from known statistics takes one pass over tiles.
//
// Sums go over kLanes lanes within a tile, then over tiles in order (TileSums): the same bits for any number of threads
// and rows.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/row_tiles.h"
#include "base/cpu/tile.h"
#include "loss/call.h"
#include "loss/cpu_exp_sums.h"

namespace ak {
namespace {

// c_j of a tile of probabilities.
AK_SIMD_CLONES void soft_span(const float* __restrict y, const CrossEntropyTerms& terms, float* __restrict c,
                              int64_t n) {
  const float own = terms.own, shared = terms.shared;
  for (int64_t i = 0; i < n; ++i) c[i] = fma(own, y[i], shared);
}
AK_SIMD_CLONES void fill_span(float value, float* __restrict c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) c[i] = value;
}
AK_SIMD_CLONES void weight_span(const float* __restrict w, float* __restrict c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) c[i] *= w[i];
}

float moved_span(const float* c, const float* x, float largest, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    const auto moved = [=](float of, float v) AK_ALWAYS_INLINE { return of * (v - largest); };
    return sum_of_lanes<Floats>(
        n,
        [=](int64_t i, Floats& t) AK_ALWAYS_INLINE {
          Floats v;
          load_floats(c + i, t), load_floats(x + i, v), t = of_lanes(moved, t, v);
        },
        [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, moved, c, x); });
  });
}

AK_SIMD_CLONES void gradient_span(const float* __restrict e, float slope, float* __restrict grad, int64_t n) {
  map_lanes(n, grad, [=](float own) __attribute__((always_inline)) { return slope * own; }, e);
}
AK_SIMD_CLONES void gradient_span(const float* __restrict e, float slope, const float* __restrict c, float factor,
                                  float* __restrict grad, int64_t n) {
  const auto gradient = [=](float own, float of)
                            __attribute__((always_inline)) { return fma(slope, own, -factor * of); };
  map_lanes(n, grad, gradient, e, c);
}

AK_SIMD_CLONES void divide_span(const float* __restrict x, float by, float* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = div(x[i], by);
}

// The sum of 2^64 t exp(t) of a tile, t = x - base.
float moment_span(const float* x, float base, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    const auto term = [=](float v) AK_ALWAYS_INLINE {
      const float t = logit_in_range(v - base);
      return scaled_exp(t) * t;
    };
    return sum_of_lanes<Floats>(
        n, [=](int64_t i, Floats& t) AK_ALWAYS_INLINE { load_floats(x + i, t), t = of_lanes(term, t); },
        [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, term, x); });
  });
}
float moment_of_row(const float* x, float base, int64_t n) {
  TileSums sum;
  for_tiles(n, [&](int64_t at, int64_t count) { sum.add(moment_span(x + at, base, count) * kExpUnscale); });
  return sum.total();
}

// The gradient of a row but for the target's own part.
AK_SIMD_CLONES void known_span(const float* x, float largest, float slope, float bend, float* grad, int64_t n) {
  const auto gradient = [=](float v) __attribute__((always_inline)) {
    const float t = logit_in_range(v - largest);
    return scaled_exp(t) * kExpUnscale * fma(bend, t, slope);
  };
  map_lanes(n, grad, gradient, x);
}

// The rows of a block: with few classes enough rows that the calls and the latency of logarithms, paid once a block,
// are small compared with its exponentials.
constexpr int64_t kMostRows = 64, kBlock = 4 * kTile;
int64_t rows_of_block(int64_t classes) { return std::clamp<int64_t>(kBlock / classes, 1, kMostRows); }
using OfRows = float[kMostRows];

// CrossEntropySums (loss/formula.h) of the rows of a block.
struct BlockSums {
  OfRows largest, sum_exp, total, moved, row;

  // Fills the last vector with ones behind the rows: leftovers may be subnormal numbers, which are slow.
  void fill_from(int64_t rows) {
    for (float* of : {largest, sum_exp, total, moved, row})
      std::fill(of + rows, of + (rows + kFloats - 1) / kFloats * kFloats, 1.0f);
  }
};

// The rows of a block that are not ignored.
struct BlockRows {
  const float* x[kMostRows];
  float* e;  // a buffer for their exponentials, which may hold the logits
  int64_t index[kMostRows];
  int64_t count = 0, classes;
};

void largest_of_rows(const BlockRows& rows, float* largest) {
  with_lanes([=, x = rows.x, count = rows.count, classes = rows.classes]<typename Floats>() AK_ALWAYS_INLINE {
    const auto of_row = [=](int64_t k) AK_ALWAYS_INLINE { return largest_lanes<Floats>(x[k], classes); };
    join_rows(count, largest, of_row, Larger{});
  });
}
// A row of several tiles adds them in order.
template <bool kKeeps>
void exp_rows(const BlockRows& rows, const float* largest, float* sum_exp) {
  with_lanes([=, x = rows.x, e = rows.e, count = rows.count, n = rows.classes]<typename Floats>() AK_ALWAYS_INLINE {
    if (n <= kTile) {
      const auto of_row = [=](int64_t k)
                              AK_ALWAYS_INLINE { return exp_lanes<kKeeps, Floats>(x[k], largest[k], e + k * n, n); };
      join_rows(count, sum_exp, of_row, Add{});
      for (int64_t k = 0; k < count; ++k) sum_exp[k] *= kExpUnscale;
      return;
    }
    for (int64_t k = 0; k < count; ++k) {
      TileSums sum;
      for (int64_t at = 0; at < n; at += kTile)
        sum.add(exp_row<kKeeps, Floats>(x[k] + at, largest[k], e + k * n + at, std::min(kTile, n - at)));
      sum_exp[k] = sum.total();
    }
  });
}
// By whole vectors, including the lanes of the last one that have no row.
AK_SIMD_CLONES void finish_rows(const CrossEntropyTerms& terms, const BlockSums& sums, int64_t rows, float* loss,
                                float* slope) {
  const CrossEntropyTerms of = terms;
  for (int64_t first = 0; first < rows; first += kFloats) {
#pragma GCC unroll 1
    for (int64_t k = first; k < first + kFloats; ++k) {
      const CrossEntropyRow row =
          cross_entropy_row(of, {sums.largest[k], sums.sum_exp[k], sums.total[k], sums.moved[k], sums.row[k]});
      loss[k] = row.loss;
      slope[k] = row.slope;
    }
  }
}

void store_statistics(const CrossEntropyRows& p, int64_t row, float largest, float sum_exp, float moment) {
  const float values[] = {largest, sum_exp, moment};
  for (int i = 0; i < p.statistics_count; ++i) p.statistics[i * p.statistics_stride + row] = values[i];
}

// At most rows_of_block(classes) rows from `first` on. `e`: a buffer for all of their classes; fp32 logits are read in
// place.
template <typename T, typename Grad>
void block_of_rows(const CrossEntropyRows& p, int64_t first, int64_t count, const T* logits, Grad* grad, float* e) {
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  const int64_t classes = p.classes;
  const bool soft = p.soft, spread = soft || p.terms.shared != 0.0f;  // more than one c_j is not zero
  BlockRows rows;
  rows.e = e;
  rows.classes = classes;
  // Adjacent 16-bit rows are widened together.
  const bool dense = p.logits_stride == classes && classes <= kTile;
  int64_t wide = 0;
  const auto widen = [&](int64_t end) {  // the rows of the block from `wide` on, which are adjacent
    if (wide < end)
      load_tile(logits + rows.index[wide] * classes, p.type, 0, (end - wide) * classes, e + wide * classes);
    wide = end;
  };
  const int64_t *const targets = soft ? nullptr : static_cast<const int64_t*>(p.target), ignored = p.ignore_index;
  const int64_t stride = p.logits_stride, target_stride = p.target_stride;
  int64_t kept = 0;
  for (int64_t row = first; row < first + count; ++row) {
    if (targets && targets[row * target_stride] == ignored) {  // whatever values the row has
      p.loss[row] = 0.0f;
      store_statistics(p, row, 0.0f, 1.0f, 0.0f);
      if (grad) std::fill_n(grad + row * p.grad_stride, classes, Grad{});
      if (dense && !kIsFloat) widen(kept);
      continue;
    }
    float* const own = e + kept * classes;
    const T* const from = logits + row * stride;
    if constexpr (kIsFloat) {
      if (p.temperature) divide_span(from, p.temperature[row * p.temperature_stride], own, classes);
      rows.x[kept] = p.temperature ? own : from;
    } else {
      rows.x[kept] = own;
      if (!dense) load_tile(from, p.type, 0, classes, own);
    }
    rows.index[kept++] = row;
  }
  rows.count = kept;
  if (rows.count == 0) return;
  if (dense && !kIsFloat) widen(rows.count);

  BlockSums sums;
  largest_of_rows(rows, sums.largest);
  alignas(64) float buffer[kTile], c[kTile];
  const auto spread_tile = [&](int64_t row, int64_t at, int64_t n) {  // c_j without the target's own part
    if (soft) {
      soft_span(load_tile(p.target, p.target_type, row * p.target_stride + at, n, buffer), p.terms, c, n);
    } else {
      fill_span(p.terms.shared, c, n);
    }
    if (p.weight) weight_span(p.weight + at, c, n);
  };
  const float own = p.terms.own;
  for (int64_t k = 0; k < kept; ++k) {
    const int64_t target = targets ? targets[rows.index[k] * target_stride] : 0;
    const float weight = targets && p.weight ? p.weight[target] : 1.0f, of_target = targets ? own * weight : 0.0f;
    sums.row[k] = weight;
    sums.total[k] = of_target;
    sums.moved[k] = targets ? of_target * (rows.x[k][target] - sums.largest[k]) : 0.0f;
  }
  for (int64_t k = 0; spread && k < kept; ++k) {
    TileSums total(sums.total[k]), moved(sums.moved[k]);
    for (int64_t at = 0; at < classes; at += kTile) {
      const int64_t n = std::min(kTile, classes - at);
      spread_tile(rows.index[k], at, n);
      total.add(sum_of_span(c, n));
      moved.add(moved_span(c, rows.x[k] + at, sums.largest[k], n));
    }
    sums.total[k] = total.total();
    sums.moved[k] = moved.total();
  }
  OfRows moments;  // before exponentials take the place of divided logits
  for (int64_t k = 0; p.statistics_count == 3 && k < kept; ++k)
    moments[k] = moment_of_row(rows.x[k], sums.largest[k], classes);
  if (grad) {
    exp_rows<true>(rows, sums.largest, sums.sum_exp);
  } else {
    exp_rows<false>(rows, sums.largest, sums.sum_exp);
  }
  for (int64_t k = 0; p.statistics && k < kept; ++k)
    store_statistics(p, rows.index[k], sums.largest[k], sums.sum_exp[k], p.statistics_count == 3 ? moments[k] : 0.0f);
  sums.fill_from(rows.count);
  OfRows loss, slopes;
  finish_rows(p.terms, sums, rows.count, loss, slopes);
  for (int64_t k = 0; k < rows.count; ++k) p.loss[rows.index[k]] = loss[k];
  for (int64_t k = 0; grad && k < rows.count; ++k) {
    const int64_t row = rows.index[k];
    Grad* const to = grad + row * p.grad_stride;
    const float* const exponentials = rows.e + k * classes;
    const float factor = p.factor[row * p.factor_stride], slope = factor * slopes[k];
    for (int64_t at = 0; at < classes; at += kTile) {
      const int64_t n = std::min(kTile, classes - at);
      if (spread) spread_tile(row, at, n);
      make_rounded(to + at, buffer, n, [&](float* out) {
        if (spread) {
          gradient_span(exponentials + at, slope, c, factor, out, n);
        } else {
          gradient_span(exponentials + at, slope, out, n);
        }
      });
    }
    if (soft) continue;
    const int64_t target = targets[row * target_stride];
    const float of_target = p.terms.own * sums.row[k];
    const float others = spread ? p.terms.shared * (p.weight ? p.weight[target] : 1.0f) : 0.0f;
    to[target] = round_to<Grad>(fma(slope, exponentials[target], -factor * (of_target + others)));
  }
}

// The gradient of a row of which the first pass is known. Its values may take the place of logits in front of them.
template <typename Grad>
void row_from_known(const CrossEntropyRows& p, int64_t row) {
  const int64_t target = static_cast<const int64_t*>(p.target)[row * p.target_stride];
  Grad* const to = static_cast<Grad*>(p.grad) + row * p.grad_stride;
  if (target == p.ignore_index) {
    std::fill_n(to, p.classes, Grad{});
    return;
  }
  const float *const x = static_cast<const float*>(p.logits) + row * p.logits_stride, *const known = p.known + row;
  const float largest = known[0], sum_exp = known[p.known_stride], factor = p.factor[row * p.factor_stride];
  const bool bent = p.entropy_factor != nullptr;
  const float bend = bent ? -div(p.entropy_factor[row * p.entropy_stride], sum_exp) : 0.0f;
  const float mean = bent ? div(known[2 * p.known_stride], sum_exp) : 0.0f;
  const float slope = fma(-bend, mean, div(factor, sum_exp));
  alignas(64) float divided[kTile], made[kTile];
  for_tiles(p.classes, [&](int64_t at, int64_t n) {
    const float* from = x + at;
    if (p.temperature) divide_span(from, p.temperature[row * p.temperature_stride], divided, n), from = divided;
    make_rounded(to + at, made, n, [&](float* out) {
      known_span(from, largest, slope, bend, out, n);
      if (target >= at && target < at + n) out[target - at] -= factor;
    });
  });
}

template <typename T, typename Grad>
void run(const CrossEntropyRows& p) {
  const int64_t classes = p.classes, block = rows_of_block(classes);
  torch::stable::parallel_for(0, p.rows, std::max<int64_t>(1, 32768 / classes), [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, float>) {
      if (p.known) {
        for (int64_t row = begin; row < end; ++row) row_from_known<Grad>(p, row);
        return;
      }
    }
    RowBuffer e(std::min(block, end - begin) * classes);
    for (int64_t row = begin; row < end; row += block)
      block_of_rows(p, row, std::min(block, end - row), static_cast<const T*>(p.logits), static_cast<Grad*>(p.grad),
                    e.get());
  });
}

}  // namespace

AK_EXPORT Status cross_entropy_rows(const CrossEntropyRows& call, Stream) {
  if (call.type == DType::kFloat32) {
    with_narrow_dtype(call.grad_type, [&]<typename Grad>(Grad) { run<float, Grad>(call); });
  } else {
    with_narrow_dtype(call.type, [&]<typename T>(T) { run<T, T>(call); });
  }
  return {};
}

}  // namespace ak
