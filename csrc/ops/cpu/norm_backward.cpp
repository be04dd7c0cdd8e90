// norm_backward on the CPU: the gradient of the rows, and of weight and bias as sums over the rows.
//
// Work: reads grad and x once, writes as much as x. The rows are cut into strips that depend on their number alone; a
// strip leaves its sums over rows in a slot of its own, and the slots are added in order: the same bits for any number
// of threads. Trap: the sums over rows are fp32 whatever the dtypes, one slot per 1/64 of the rows keeps their error
// that of a few additions.
#include <algorithm>
#include <vector>

#include "math/layer_norm.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/row_sums.h"
#include "ops/cpu/tile.h"
#include "ops/norm_arguments.h"

namespace ak {
namespace {

constexpr int64_t kStrips = 64;
constexpr int64_t kRowsPerStrip = 4;  // fewer are not worth a slot

// n[i], the normalised x, and g[i], the gradient of that.
AK_SIMD_CLONES void normalized_span(const float* __restrict x, const float* __restrict grad,
                                    const float* __restrict weight, float mean, float rstd, float* __restrict n,
                                    float* __restrict g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    n[i] = normalized(x[i], mean, rstd);
    g[i] = grad[i] * weight[i];
  }
}

AK_SIMD_CLONES void add_products(const float* __restrict grad, const float* __restrict n, float* __restrict sums,
                                 int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] = fma(grad[i], n[i], sums[i]);
}

AK_SIMD_CLONES void add_span(const float* __restrict from, float* __restrict sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
}

template <typename X>
AK_SIMD_CLONES void gradient_span(const float* __restrict g, const float* __restrict n, float rstd, float mean_g,
                                  float mean_gn, const float* grad_sum, X* __restrict out, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i)
    out[i] = round_to<X>(norm_gradient(g[i], n[i], rstd, mean_g, mean_gn) + grad_sum[i]);
}

struct Problem {
  const Tensor &grad, &x;
  const Tensor* grad_sum;
  const float *weight, *mean, *rstd;
  void* out;
  int64_t parameters;
};

// The rows [begin, end), whose sums are added to those of `sums`: of the weight, then of the bias.
void backward_rows(const Problem& p, int64_t begin, int64_t end, float* sums) {
  const int64_t columns = p.x.size(1);
  const auto size = static_cast<size_t>(columns);
  std::vector<float> grad_buffer(size), x_buffer(size), n(size), g(size), sum_buffer(size, 0.0f);
  const float count = static_cast<float>(columns);
  const ScalarType dtype = p.x.scalar_type();
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * columns;
    const float* grad = load_tile(p.grad.const_data_ptr(), p.grad.scalar_type(), at, columns, grad_buffer.data());
    const float* x = load_tile(p.x.const_data_ptr(), dtype, at, columns, x_buffer.data());
    const float* added =
        p.grad_sum ? load_tile(p.grad_sum->const_data_ptr(), p.grad_sum->scalar_type(), at, columns, sum_buffer.data())
                   : sum_buffer.data();
    const float rstd = p.rstd[r];
    normalized_span(x, grad, p.weight, p.mean ? p.mean[r] : 0.0f, rstd, n.data(), g.data(), columns);
    if (p.parameters > 0) add_products(grad, n.data(), sums, columns);
    if (p.parameters > 1) add_span(grad, sums + columns, columns);
    const float mean_gn = row_sum_of_products(g.data(), n.data(), columns) / count;
    const float mean_g = p.mean ? row_sum(g.data(), columns, 1.0f) / count : 0.0f;
    if (dtype == ScalarType::Float) {
      gradient_span(g.data(), n.data(), rstd, mean_g, mean_gn, added, static_cast<float*>(p.out) + at, columns);
    } else if (dtype == ScalarType::Half) {
      gradient_span(g.data(), n.data(), rstd, mean_g, mean_gn, added, static_cast<fp16*>(p.out) + at, columns);
    } else {
      gradient_span(g.data(), n.data(), rstd, mean_g, mean_gn, added, static_cast<bf16*>(p.out) + at, columns);
    }
  }
}

std::tuple<Tensor, Tensor> norm_backward(const Tensor& grad_in, const Tensor& x_in, const Tensor& rstd_in,
                                         const std::optional<Tensor> mean_in, const std::optional<Tensor> weight,
                                         const std::optional<Tensor> grad_sum_in, const int64_t parameters) {
  check_norm_backward(grad_in, x_in, rstd_in, mean_in, weight, grad_sum_in, parameters);
  for (const auto* t : {&mean_in, &weight, &grad_sum_in})
    AK_CHECK(grad_in.is_cpu() && x_in.is_cpu() && rstd_in.is_cpu() && (!*t || (*t)->is_cpu()),
             "norm_backward: all tensors must be on the CPU");
  const Tensor grad = torch::stable::contiguous(grad_in), x = torch::stable::contiguous(x_in),
               rstd = torch::stable::contiguous(rstd_in), mean = mean_in ? torch::stable::contiguous(*mean_in) : rstd,
               grad_sum = grad_sum_in ? torch::stable::contiguous(*grad_sum_in) : grad;
  const int64_t rows = x.size(0), columns = x.size(1), width = parameters * columns;
  const Tensor out = torch::stable::empty({rows, columns}, x.scalar_type());
  const Tensor totals = torch::stable::empty({parameters, columns}, ScalarType::Float);
  std::vector<float> scale(static_cast<size_t>(columns), 1.0f);
  const Tensor dense_weight = weight ? torch::stable::contiguous(*weight) : rstd;
  const Problem problem{
      grad,
      x,
      grad_sum_in ? &grad_sum : nullptr,
      weight ? load_tile(dense_weight.const_data_ptr(), dense_weight.scalar_type(), 0, columns, scale.data())
             : scale.data(),
      mean_in ? static_cast<const float*>(mean.const_data_ptr()) : nullptr,
      static_cast<const float*>(rstd.const_data_ptr()),
      out.mutable_data_ptr(),
      parameters};

  const int64_t strips = std::clamp<int64_t>((rows + kRowsPerStrip - 1) / kRowsPerStrip, 1, kStrips);
  std::vector<float> sums(static_cast<size_t>(strips * width), 0.0f);
  const int64_t grain = std::max<int64_t>(1, strips * kGrain / std::max<int64_t>(1, rows * columns));
  torch::stable::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      backward_rows(problem, rows * s / strips, rows * (s + 1) / strips, sums.data() + s * width);
  });
  float* to = static_cast<float*>(totals.mutable_data_ptr());
  torch::stable::parallel_for(0, width, std::max<int64_t>(1, kGrain / strips), [&](int64_t begin, int64_t end) {
    std::fill(to + begin, to + end, 0.0f);
    for (int64_t s = 0; s < strips; ++s) add_span(sums.data() + s * width + begin, to + begin, end - begin);
  });
  return {out, totals};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("norm_backward", TORCH_BOX(&ak::norm_backward)); }
