// norm_forward on the CPU: y = (s - mean) * rstd * weight + bias of the rows of s = x + residual.
//
// Work: reads x (and residual), writes y (and s). A row is widened into a buffer that stays in the cache, where the
// passes for mean, mean square and result find it; a row of fp32 without residual is its own buffer. Rows are
// independent, so the result has the same bits for any number of threads.
#include <algorithm>
#include <vector>

#include "math/layer_norm.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/empty.h"
#include "ops/cpu/row_sums.h"
#include "ops/cpu/tile.h"
#include "ops/norm_arguments.h"

namespace ak {
namespace {

AK_SIMD_CLONES void add_spans(const float* x, const float* y, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

struct Statistics {
  float mean, rstd;
};

Statistics statistics_of(const float* row, int64_t n, float eps, bool centred) {
  const float count = static_cast<float>(n);
  for (float factor = 1.0f;; factor = kShrink) {
    const float mean = centred ? row_sum(row, n, factor) / count : 0.0f;
    const float square = row_sum_of_squares(row, n, factor, mean) / count;
    if (is_finite(square) || factor != 1.0f) {
      return {unshrunk_mean(mean, factor), reciprocal_deviation(square, eps, factor)};
    }
  }
}

template <typename Y>
AK_SIMD_CLONES void normalize_span(const float* x, Statistics s, const float* weight, const float* bias, Y* out,
                                   int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i)
    out[i] = round_to<Y>(scaled_and_shifted(normalized(x[i], s.mean, s.rstd), weight[i], bias[i]));
}

// `buffer` may be where x is.
void normalize_row(const float* x, Statistics s, const float* weight, const float* bias, void* out, ScalarType dtype,
                   int64_t at, int64_t n, float* buffer) {
  const auto make = [=](auto* to) { normalize_span(x, s, weight, bias, to, n); };
  if (dtype == ScalarType::Float) {
    make(static_cast<float*>(out) + at);
  } else if (dtype == ScalarType::Half) {
    make_rounded(static_cast<fp16*>(out) + at, buffer, n, make);
  } else {
    make(static_cast<bf16*>(out) + at);
  }
}

// A parameter as floats: its own memory, or `buffer`.
const float* widened(const std::optional<Tensor>& parameter, float absent, std::vector<float>& buffer, int64_t n) {
  buffer.assign(static_cast<size_t>(n), absent);
  if (!parameter) return buffer.data();
  return load_tile(parameter->const_data_ptr(), parameter->scalar_type(), 0, n, buffer.data());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(const Tensor& x_in, const std::optional<Tensor> weight_in,
                                                        const std::optional<Tensor> bias_in,
                                                        const std::optional<Tensor> residual_in, const double eps,
                                                        const bool centred, const ScalarType out_dtype) {
  check_norm_forward(x_in, weight_in, bias_in, residual_in, out_dtype);
  for (const auto* t : {&weight_in, &bias_in, &residual_in})
    AK_CHECK(x_in.is_cpu() && (!*t || (*t)->is_cpu()), "norm_forward: all tensors must be on the CPU");
  const Tensor x = torch::stable::contiguous(x_in);
  const auto weight = without_gaps(weight_in), bias = without_gaps(bias_in), residual = without_gaps(residual_in);
  const int64_t rows = x.size(0), n = x.size(1);
  const ScalarType x_dtype = x.scalar_type(), sum_dtype = residual ? residual->scalar_type() : x_dtype;
  const Tensor y = empty_tensor({rows, n}, out_dtype);
  const Tensor sum = residual ? empty_tensor({rows, n}, sum_dtype) : empty_tensor({0}, x_dtype);
  const Tensor mean = empty_tensor({centred ? rows : 0}, ScalarType::Float);
  const Tensor rstd = empty_tensor({rows}, ScalarType::Float);

  std::vector<float> weight_buffer, bias_buffer;
  const float* scale = widened(weight, 1.0f, weight_buffer, n);
  const float* shift = widened(bias, 0.0f, bias_buffer, n);
  const void* from = x.const_data_ptr();
  const void* added = residual ? residual->const_data_ptr() : nullptr;
  void *sums = sum.mutable_data_ptr(), *out = y.mutable_data_ptr();
  float* means = static_cast<float*>(mean.mutable_data_ptr());
  float* rstds = static_cast<float*>(rstd.mutable_data_ptr());
  const float epsilon = static_cast<float>(eps);

  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / n), [=](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(n)), other(static_cast<size_t>(added ? n : 0));
    for (int64_t r = begin; r < end; ++r) {
      const float* row = load_tile(from, x_dtype, r * n, n, buffer.data());
      if (added) {
        const float* addend = load_tile(added, sum_dtype, r * n, n, other.data());
        const bool wide = sum_dtype == ScalarType::Float;
        float* total = wide ? static_cast<float*>(sums) + r * n : other.data();
        add_spans(row, addend, total, n);
        store_tile(total, sums, sum_dtype, r * n, n);
        row = load_tile(static_cast<const void*>(sums), sum_dtype, r * n, n, buffer.data());
      }
      const Statistics s = statistics_of(row, n, epsilon, centred);
      if (centred) means[r] = s.mean;
      rstds[r] = s.rstd;
      normalize_row(row, s, scale, shift, out, out_dtype, r * n, n, buffer.data());
    }
  });
  return {y, sum, mean, rstd};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("norm_forward", TORCH_BOX(&ak::norm_forward)); }
