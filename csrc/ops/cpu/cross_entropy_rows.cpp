// cross_entropy_rows_ on the CPU: losses of rows of logits and, on request, their gradients, which may take the place
// of the logits. A thread works on a row at a time, or on several short ones, widened to fp32 into memory of its own,
// which fits into the L2 cache: so the logits are read once and each exponential is computed once.
//
// Sums go over kLanes lanes within a tile, then over tiles in order: the same bits for any number of threads and rows.
#include <algorithm>

#include "ops/cpu/arguments.h"
#include "ops/cpu/cross_entropy_call.h"
#include "ops/cpu/exp_sums.h"
#include "ops/cpu/row_tiles.h"
#include "ops/cpu/tile.h"
#include "ops/cross_entropy.h"

namespace ak {
namespace {

constexpr const char* kOp = "cross_entropy_rows_";
// c_j of probabilities, or the part of it that smoothing gives each class, for a tile.
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

AK_SIMD_CLONES float moved_span(const float* c, const float* x, float largest, int64_t n) {
  return sum_of_lanes(
      n,
      [=](int64_t i, Floats& t) __attribute__((always_inline)) {
        Floats moved;
        load_floats(c + i, t), load_floats(x + i, moved), t *= moved - largest;
      },
      [=](int64_t i, float* rest) __attribute__((always_inline)) {
        make_rest(
            i, n, rest, [=](float of, float v) __attribute__((always_inline)) { return of * (v - largest); }, c, x);
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

struct Problem {
  CrossEntropyShape shape;
  CrossEntropyTerms terms;
  ScalarType logits_dtype;
  const void* target;
  ScalarType target_dtype;
  const float* weight;
  const float* factor;
  int64_t factor_stride, ignore_index;
  float* loss;
};

// What one read of the rows of a block finds (math/cross_entropy.h).
struct BlockSums {
  PerRow largest = {}, sum_exp = {}, total = {}, moved = {}, row = {};
};

// The rows of a block that count: where their logits are, and how many they are.
struct BlockRows {
  const float* x[kRowsTogether];
  float* e[kRowsTogether];  // memory for the exponentials of a row, which may be where its logits are
  int64_t index[kRowsTogether];
  int64_t count = 0, classes;
};

AK_SIMD_CLONES void largest_of_rows(const BlockRows& rows, float* largest) {
  for (int64_t k = 0; k < rows.count; ++k) largest[k] = largest_of_row(rows.x[k], rows.classes);
}
template <bool kKeeps>
AK_SIMD_CLONES void exp_rows(const BlockRows& rows, const float* largest, float* sum_exp) {
  for (int64_t k = 0; k < rows.count; ++k) {
    float sum = 0.0f;
    for (int64_t at = 0; at < rows.classes; at += kTile)
      sum += exp_row<kKeeps>(rows.x[k] + at, largest[k], rows.e[k] + at, std::min(kTile, rows.classes - at));
    sum_exp[k] = sum;
  }
}
AK_SIMD_CLONES void finish_rows(const CrossEntropyTerms& terms, const BlockSums& sums, float* loss, float* slope) {
  const CrossEntropyTerms of = terms;
  for (int64_t k = 0; k < kRowsTogether; ++k) {
    const CrossEntropyRow row =
        cross_entropy_row(of, {sums.largest[k], sums.sum_exp[k], sums.total[k], sums.moved[k], sums.row[k]});
    loss[k] = row.loss;
    slope[k] = row.slope;
  }
}

// At most kRowsTogether rows from `first` on. `e`: memory for all of their classes; fp32 logits are read where they
// are.
template <typename T>
void block_of_rows(const Problem& p, int64_t first, int64_t count, const T* logits, T* grad, float* e) {
  const int64_t classes = p.shape.classes;
  const bool soft = p.shape.soft, spread = soft || p.terms.shared != 0.0f;  // whether more than one c_j is not zero
  const auto target_of = [&](int64_t row) {
    return soft ? 0 : static_cast<const int64_t*>(p.target)[row * p.shape.target_stride];
  };
  BlockRows rows;
  rows.classes = classes;
  for (int64_t row = first; row < first + count; ++row) {
    if (!soft && target_of(row) == p.ignore_index) {  // whatever the row holds
      p.loss[row] = 0.0f;
      if (grad) std::fill_n(grad + row * p.shape.grad_stride, classes, T{});
      continue;
    }
    float* const own = e + rows.count * classes;
    const void* const from = logits + row * p.shape.logits_stride;
    rows.x[rows.count] = load_tile(from, p.logits_dtype, 0, classes, own);
    rows.e[rows.count] = own;
    rows.index[rows.count++] = row;
  }
  if (rows.count == 0) return;

  BlockSums sums;
  largest_of_rows(rows, sums.largest);
  alignas(64) float buffer[kTile], c[kTile];
  const auto spread_tile = [&](int64_t row, int64_t at, int64_t n) {  // c_j without the target's own part
    if (soft) {
      soft_span(load_tile(p.target, p.target_dtype, row * p.shape.target_stride + at, n, buffer), p.terms, c, n);
    } else {
      fill_span(p.terms.shared, c, n);
    }
    if (p.weight) weight_span(p.weight + at, c, n);
  };
  for (int64_t k = 0; k < rows.count; ++k) {
    const float *const x = rows.x[k], largest = sums.largest[k];
    sums.row[k] = 1.0f;
    if (!soft) {
      const int64_t target = target_of(rows.index[k]);
      if (p.weight) sums.row[k] = p.weight[target];
      sums.total[k] = p.terms.own * sums.row[k];
      sums.moved[k] = sums.total[k] * (x[target] - largest);
    }
    for (int64_t at = 0; spread && at < classes; at += kTile) {
      const int64_t n = std::min(kTile, classes - at);
      spread_tile(rows.index[k], at, n);
      sums.total[k] += sum_of_span(c, n);
      sums.moved[k] += moved_span(c, x + at, largest, n);
    }
  }
  if (grad) {
    exp_rows<true>(rows, sums.largest, sums.sum_exp);
  } else {
    exp_rows<false>(rows, sums.largest, sums.sum_exp);
  }
  PerRow loss, slopes;
  finish_rows(p.terms, sums, loss, slopes);
  for (int64_t k = 0; k < rows.count; ++k) p.loss[rows.index[k]] = loss[k];
  for (int64_t k = 0; grad && k < rows.count; ++k) {
    const int64_t row = rows.index[k];
    T* const to = grad + row * p.shape.grad_stride;
    const float* const exponentials = rows.e[k];
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
    const int64_t target = target_of(row);
    const float own = p.terms.own * sums.row[k];
    const float others = spread ? p.terms.shared * (p.weight ? p.weight[target] : 1.0f) : 0.0f;
    to[target] = round_to<T>(fma(slope, exponentials[target], -factor * (own + others)));
  }
}

template <typename T>
void run(const Problem& p, const void* logits, void* grad) {
  const int64_t classes = p.shape.classes, block = rows_together(classes);
  torch::stable::parallel_for(0, p.shape.rows, std::max<int64_t>(1, 32768 / classes), [&](int64_t begin, int64_t end) {
    RowBuffer e(block * classes);
    for (int64_t row = begin; row < end; row += block)
      block_of_rows<T>(p, row, std::min(block, end - row), static_cast<const T*>(logits), static_cast<T*>(grad),
                       e.get());
  });
}

void run(const Problem& p, const void* logits, void* grad) {
  with_dtype(p.logits_dtype, [&]<typename T>(T) { run<T>(p, logits, grad); });
}

void check_classes(const Tensor& target, int64_t classes, int64_t ignore_index) {
  const int64_t* values = static_cast<const int64_t*>(target.const_data_ptr());
  for (int64_t row = 0; row < target.size(0); ++row) {
    const int64_t value = values[row * target.stride(0)];
    AK_CHECK((value >= 0 && value < classes) || value == ignore_index, kOp, ": target[", row, "] is ", value,
             "; accepted: 0 to ", classes - 1, ", and ignore_index, ", ignore_index);
  }
}

void cross_entropy_rows(const Tensor& logits, const Tensor& target, std::optional<Tensor> weight,
                        std::optional<Tensor> factor, Tensor loss, std::optional<Tensor> grad, int64_t ignore_index,
                        double label_smoothing, double z_loss) {
  const CrossEntropyShape shape = check_cross_entropy(kOp, logits, target, weight, factor, loss, grad);
  for (const auto& [name, t] : {std::pair{"logits", &logits}, {"target", &target}, {"loss", &std::as_const(loss)}})
    check_cpu(kOp, {name}, *t);
  if (weight) check_cpu(kOp, {"weight"}, *weight);
  if (factor) check_cpu(kOp, {"factor"}, *factor);
  if (grad) check_cpu(kOp, {"grad"}, *grad);
  if (!shape.soft) check_classes(target, shape.classes, ignore_index);
  const Problem problem{shape,
                        cross_entropy_terms(label_smoothing, z_loss, shape.classes),
                        logits.scalar_type(),
                        target.const_data_ptr(),
                        target.scalar_type(),
                        weight ? static_cast<const float*>(weight->const_data_ptr()) : nullptr,
                        factor ? static_cast<const float*>(factor->const_data_ptr()) : nullptr,
                        factor ? factor->stride(0) : 0,
                        ignore_index,
                        static_cast<float*>(loss.mutable_data_ptr())};
  run(problem, logits.const_data_ptr(), grad ? grad->mutable_data_ptr() : nullptr);
}

}  // namespace

void cross_entropy_call(const CrossEntropyCall& call) {
  const Problem problem{
      {call.rows, call.classes, call.logits_stride, call.target_stride, /*grad_stride=*/call.classes, /*soft=*/false},
      cross_entropy_terms(call.label_smoothing, call.z_loss, call.classes),
      call.logits_type,
      call.target,
      ScalarType::Long,
      /*weight=*/nullptr,
      &call.factor,
      /*factor_stride=*/0,
      call.ignore_index,
      call.loss};
  run(problem, call.logits, call.grad);
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("cross_entropy_rows_", TORCH_BOX(&ak::cross_entropy_rows)); }
