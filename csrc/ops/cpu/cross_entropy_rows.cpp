// cross_entropy_rows_ on the CPU: losses of rows of logits and, on request, their gradients, which may take the place
// of the logits. A thread works on a row at a time, widened to fp32 into memory of its own, which fits into the L2
// cache: so the logits are read once and each exponential is computed once.
//
// Sums go over kLanes lanes within a tile, then over tiles in order: the same bits for any number of threads and rows.
#include <algorithm>
#include <cmath>
#include <memory>

#include "ops/cpu/arguments.h"
#include "ops/cpu/exp_sums.h"
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

AK_SIMD_CLONES float sum_span(const float* __restrict x, int64_t n) {
  return sum_of_lanes(n, [=](int64_t i) { return x[i]; });
}
AK_SIMD_CLONES float moved_span(const float* __restrict c, const float* __restrict x, float largest, int64_t n) {
  return sum_of_lanes(n, [=](int64_t i) { return c[i] * (x[i] - largest); });
}

template <typename T>
AK_SIMD_CLONES void gradient_span(const float* __restrict e, float slope, T* __restrict grad, int64_t n) {
  for (int64_t i = 0; i < n; ++i) grad[i] = round_to<T>(slope * e[i]);
}
template <typename T>
AK_SIMD_CLONES void gradient_span(const float* __restrict e, float slope, const float* __restrict c, float factor,
                                  T* __restrict grad, int64_t n) {
  for (int64_t i = 0; i < n; ++i) grad[i] = round_to<T>(fma(slope, e[i], -factor * c[i]));
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

// One row. `e`: memory for all of its classes; fp32 logits are read where they are.
template <typename T>
void row_of(const Problem& p, int64_t row, const T* logits, T* grad, float* e) {
  const int64_t classes = p.shape.classes;
  const bool soft = p.shape.soft, spread = soft || p.terms.shared != 0.0f;  // whether more than one c_j is not zero
  const int64_t target = soft ? 0 : static_cast<const int64_t*>(p.target)[row * p.shape.target_stride];
  if (!soft && target == p.ignore_index) {  // whatever the row holds
    p.loss[row] = 0.0f;
    if (grad) std::fill_n(grad, classes, T{});
    return;
  }
  const float* x = load_tile(static_cast<const void*>(logits), p.logits_dtype, 0, classes, e);
  CrossEntropySums sums{};
  sums.largest = largest_of_span(x, classes, -HUGE_VALF);
  sums.row = soft || !p.weight ? 1.0f : p.weight[target];
  const float own = soft ? 0.0f : p.terms.own * sums.row;
  alignas(64) float buffer[kTile], c[kTile];
  const auto spread_tile = [&](int64_t at, int64_t n) {  // c_j without the target's own part
    if (soft) {
      soft_span(load_tile(p.target, p.target_dtype, row * p.shape.target_stride + at, n, buffer), p.terms, c, n);
    } else {
      fill_span(p.terms.shared, c, n);
    }
    if (p.weight) weight_span(p.weight + at, c, n);
  };
  if (!soft) {
    sums.total = own;
    sums.moved = own * (x[target] - sums.largest);
  }
  for (int64_t at = 0; at < classes; at += kTile) {
    const int64_t n = std::min(kTile, classes - at);
    if (spread) {
      spread_tile(at, n);
      sums.total += sum_span(c, n);
      sums.moved += moved_span(c, x + at, sums.largest, n);
    }
    sums.sum_exp += exp_span(x + at, sums.largest, e + at, n);
  }
  const CrossEntropyRow result = cross_entropy_row(p.terms, sums);
  p.loss[row] = result.loss;
  if (!grad) return;
  const float factor = p.factor[row * p.factor_stride], slope = factor * result.slope;
  for (int64_t at = 0; at < classes; at += kTile) {
    const int64_t n = std::min(kTile, classes - at);
    if (spread) spread_tile(at, n);
    make_rounded(grad + at, buffer, n, [&](auto* out) {
      if (spread) {
        gradient_span(e + at, slope, c, factor, out, n);
      } else {
        gradient_span(e + at, slope, out, n);
      }
    });
  }
  if (!soft) {
    const float others = spread ? p.terms.shared * (p.weight ? p.weight[target] : 1.0f) : 0.0f;
    grad[target] = round_to<T>(fma(slope, e[target], -factor * (own + others)));
  }
}

template <typename T>
void run(const Problem& p, const Tensor& logits, const std::optional<Tensor>& grad) {
  const T* from = static_cast<const T*>(logits.const_data_ptr());
  T* to = grad ? static_cast<T*>(grad->mutable_data_ptr()) : nullptr;
  const int64_t grain = std::max<int64_t>(1, 32768 / p.shape.classes);
  torch::stable::parallel_for(0, p.shape.rows, grain, [&](int64_t begin, int64_t end) {
    const auto e = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(p.shape.classes));
    for (int64_t row = begin; row < end; ++row)
      row_of<T>(p, row, from + row * p.shape.logits_stride, to ? to + row * p.shape.grad_stride : nullptr, e.get());
  });
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
  switch (logits.scalar_type()) {
    case ScalarType::Half:
      return run<fp16>(problem, logits, grad);
    case ScalarType::BFloat16:
      return run<bf16>(problem, logits, grad);
    default:
      return run<float>(problem, logits, grad);
  }
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("cross_entropy_rows_", TORCH_BOX(&ak::cross_entropy_rows)); }
