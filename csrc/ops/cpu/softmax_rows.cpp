// softmax_rows and softmax_rows_backward on the CPU. A row is widened into a buffer that stays in the cache, where the
// passes for the largest value, the sum and the result find it. Rows are independent: the bits are the same for any
// number of threads.
#include <cmath>
#include <memory>

#include "math/softmax.h"
#include "ops/cpu/arguments.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/exp_sums.h"
#include "ops/cpu/tile.h"
#include "ops/softmax_arguments.h"

namespace ak {
namespace {

using Buffer = std::unique_ptr<float[]>;

Buffer make_buffer(int64_t n) { return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n)); }

AK_SIMD_CLONES void mask_span(const bool* __restrict counts, float instead, float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = counts[i] ? x[i] : instead;
}

template <typename T>
AK_SIMD_CLONES void softmax_span(const float* __restrict e, const SoftmaxRow row, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = round_to<T>(softmax_of(row, e[i]));
}
template <typename T>
AK_SIMD_CLONES void log_softmax_span(const float* __restrict x, const SoftmaxRow row, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = round_to<T>(log_softmax_of(row, x[i]));
}

AK_SIMD_CLONES float sum_of_products(const float* __restrict x, const float* __restrict y, int64_t n) {
  return sum_of_lanes(n, [=](int64_t i) { return x[i] * y[i]; });
}
AK_SIMD_CLONES float sum_of_span(const float* __restrict x, int64_t n) {
  return sum_of_lanes(n, [=](int64_t i) { return x[i]; });
}
AK_SIMD_CLONES void softmax_gradient_span(const float* __restrict y, float sum, float* __restrict g, int64_t n) {
  for (int64_t i = 0; i < n; ++i) g[i] = softmax_gradient(y[i], g[i], sum);
}
AK_SIMD_CLONES void log_softmax_gradient_span(const float* __restrict e, float inverse, float sum, float* __restrict g,
                                              int64_t n) {
  for (int64_t i = 0; i < n; ++i) g[i] = log_softmax_gradient(e[i] * inverse, g[i], sum);
}

const bool* mask_row(const Tensor& mask, int64_t row) {
  const int64_t last = row % mask.size(2), rest = row / mask.size(2);
  return static_cast<const bool*>(mask.const_data_ptr()) + rest / mask.size(1) * mask.stride(0) +
         rest % mask.size(1) * mask.stride(1) + last * mask.stride(2);
}

// The elements of a row as floats of their own, which may be changed.
float* take_row(const Tensor& t, int64_t row, int64_t n, float* buffer) {
  const float* values = load_tile(t.const_data_ptr(), t.scalar_type(), row * n, n, buffer);
  if (values != buffer) std::copy_n(values, n, buffer);
  return buffer;
}

std::tuple<Tensor, Tensor> softmax_rows(const Tensor& x, const std::optional<Tensor> mask, bool log, bool safe,
                                        ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows";
  check_softmax_matrix(op, {"x"}, x);
  check_softmax_mask(op, mask, x);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_cpu(op, {"x"}, x);
  if (mask) check_cpu(op, {"mask"}, *mask);
  const int64_t rows = x.size(0), n = x.size(1);
  const Tensor y = torch::stable::empty({rows, n}, out_dtype);
  const Tensor statistics = torch::stable::empty({2, log ? rows : 0}, ScalarType::Float);
  float* const kept = static_cast<float*>(statistics.mutable_data_ptr());
  void* const out = y.mutable_data_ptr();
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    const Buffer values = make_buffer(n), exponentials = make_buffer(n);
    for (int64_t r = begin; r < end; ++r) {
      const float* row = mask ? take_row(x, r, n, values.get())
                              : load_tile(x.const_data_ptr(), x.scalar_type(), r * n, n, values.get());
      if (mask) mask_span(mask_row(*mask, r), kMasked, values.get(), n);
      const float largest = largest_of_span(row, n, kMasked);
      const float sum = exp_span(row, softmax_base(largest), exponentials.get(), n);
      const SoftmaxRow result = softmax_row(largest, sum, safe);
      with_dtype(out_dtype, [&]<typename T>(T) {
        T* to = static_cast<T*>(out) + r * n;
        if (log) {
          log_softmax_span(row, result, to, n);
        } else {
          softmax_span(exponentials.get(), result, to, n);
        }
      });
      if (log) {
        kept[r] = result.base;
        kept[rows + r] = result.inverse;
      }
    }
  });
  return {y, statistics};
}

Tensor softmax_rows_backward(const Tensor& grad, const Tensor& of, const std::optional<Tensor> statistics,
                             const std::optional<Tensor> mask, ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows_backward";
  check_softmax_gradient(op, grad, of, statistics, mask);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  for (const auto& [name, t] : {std::pair{"grad", &grad}, {"of", &of}}) check_cpu(op, {name}, *t);
  if (statistics) check_cpu(op, {"statistics"}, *statistics);
  if (mask) check_cpu(op, {"mask"}, *mask);
  const int64_t rows = grad.size(0), n = grad.size(1);
  const Tensor out = torch::stable::empty({rows, n}, out_dtype);
  const float* const kept = statistics ? static_cast<const float*>(statistics->const_data_ptr()) : nullptr;
  void* const to = out.mutable_data_ptr();
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    const Buffer values = make_buffer(n), gradients = make_buffer(n);
    float* const g = gradients.get();
    for (int64_t r = begin; r < end; ++r) {
      take_row(grad, r, n, g);
      const float* y = load_tile(of.const_data_ptr(), of.scalar_type(), r * n, n, values.get());
      if (kept) {
        const float sum = sum_of_span(g, n);
        exp_span(y, kept[r], values.get(), n);
        log_softmax_gradient_span(values.get(), kept[rows + r], sum, g, n);
        if (mask) mask_span(mask_row(*mask, r), 0.0f, g, n);
      } else {
        softmax_gradient_span(y, sum_of_products(g, y, n), g, n);
      }
      with_dtype(out_dtype, [&]<typename T>(T) { round_span(g, static_cast<T*>(to) + r * n, n); });
    }
  });
  return out;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("softmax_rows", TORCH_BOX(&ak::softmax_rows));
  m.impl("softmax_rows_backward", TORCH_BOX(&ak::softmax_rows_backward));
}
