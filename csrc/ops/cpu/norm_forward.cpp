// norm_forward on the CPU: y = (s - mean) * rstd * weight + bias of the rows of s = x + residual, or
// dropout(x) + residual.
//
// Work: reads x (and residual), writes y (and s). A row is widened into a buffer that stays in the cache, where the
// passes for mean, mean square and result find it; a row of fp32 without residual is its own buffer. Rows are
// independent, so the result has the same bits for any number of threads.
#include <algorithm>

#include "math/layer_norm.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/dropout_span.h"
#include "ops/cpu/empty.h"
#include "ops/cpu/norm_call.h"
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

AK_SIMD_CLONES void normalize_span(const float* x, Statistics s, const float* weight, const float* bias, float* out,
                                   int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = scaled_and_shifted(normalized(x[i], s.mean, s.rstd), weight[i], bias[i]);
}

// `buffer` may be where x is.
void normalize_row(const float* x, Statistics s, const float* weight, const float* bias, void* out, ScalarType dtype,
                   int64_t at, int64_t n, float* buffer) {
  with_dtype(dtype, [&]<typename T>(T) {
    make_rounded(static_cast<T*>(out) + at, buffer, n, [=](float* to) { normalize_span(x, s, weight, bias, to, n); });
  });
}

NormParameter parameter_of(const std::optional<Tensor>& t) {
  return t ? NormParameter{t->const_data_ptr(), t->scalar_type()} : NormParameter{};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(const Tensor& x_in, const std::optional<Tensor> weight_in,
                                                        const std::optional<Tensor> bias_in,
                                                        const std::optional<Tensor> residual_in,
                                                        const std::optional<Tensor> seed, const double eps,
                                                        const bool centred, const ScalarType out_dtype,
                                                        const double dropout_p) {
  check_norm_forward(x_in, weight_in, bias_in, residual_in, seed, dropout_p, out_dtype);
  for (const auto* t : {&weight_in, &bias_in, &residual_in, &seed})
    AK_CHECK(x_in.is_cpu() && (!*t || (*t)->is_cpu()), "norm_forward: all tensors must be on the CPU");
  const Tensor x = torch::stable::contiguous(x_in);
  const auto weight = without_gaps(weight_in), bias = without_gaps(bias_in), residual = without_gaps(residual_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor y = empty_tensor({rows, columns}, out_dtype);
  const Tensor sum =
      residual ? empty_tensor({rows, columns}, residual->scalar_type()) : empty_tensor({0}, x.scalar_type());
  const Tensor mean = empty_tensor({centred ? rows : 0}, ScalarType::Float);
  const Tensor rstd = empty_tensor({rows}, ScalarType::Float);
  norm_forward_call(
      {.x = x.const_data_ptr(),
       .x_type = x.scalar_type(),
       .weight = parameter_of(weight),
       .bias = parameter_of(bias),
       .residual = residual ? residual->const_data_ptr() : nullptr,
       .sum_type = sum.scalar_type(),
       .eps = static_cast<float>(eps),
       .rows = rows,
       .columns = columns,
       .y = y.mutable_data_ptr(),
       .y_type = out_dtype,
       .sum = sum.mutable_data_ptr(),
       .mean = centred ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr,
       .rstd = static_cast<float*>(rstd.mutable_data_ptr()),
       .mask = {seed ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr, dropout_rate(dropout_p)}});
  return {y, sum, mean, rstd};
}

}  // namespace

void norm_forward_call(const NormForwardCall& call) {
  const int64_t n = call.columns;
  const bool centred = call.mean != nullptr;
  RowBuffer weight_buffer(n), bias_buffer(n);
  const float* scale = values_or(call.weight.data, call.weight.type, 1.0f, n, weight_buffer.get());
  const float* shift = values_or(call.bias.data, call.bias.type, 0.0f, n, bias_buffer.get());
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    RowBuffer buffer(n), other(call.residual ? n : 0);
    for (int64_t r = begin; r < end; ++r) {
      const float* row = load_tile(call.x, call.x_type, r * n, n, buffer.get());
      if (call.residual) {
        const float* addend = load_tile(call.residual, call.sum_type, r * n, n, other.get());
        const bool wide = call.sum_type == ScalarType::Float;
        float* total = wide ? static_cast<float*>(call.sum) + r * n : other.get();
        if (call.mask.seed) {
          drop_span(row, r * n, n, static_cast<uint64_t>(*call.mask.seed), call.mask.rate, addend, total);
        } else {
          add_spans(row, addend, total, n);
        }
        store_tile(total, call.sum, call.sum_type, r * n, n);
        row = load_tile(static_cast<const void*>(call.sum), call.sum_type, r * n, n, buffer.get());
      }
      const Statistics s = statistics_of(row, n, call.eps, centred);
      if (centred) call.mean[r] = s.mean;
      call.rstd[r] = s.rstd;
      normalize_row(row, s, scale, shift, call.y, call.y_type, r * n, n, buffer.get());
    }
  });
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("norm_forward", TORCH_BOX(&ak::norm_forward)); }
