// norm_backward on the CPU: the gradient of the rows, and of weight and bias as sums over the rows.
//
// Work: reads grad and x once, writes as much as x. The number of rows alone determines the strips into which they are
// cut. A strip leaves its sums over rows in a slot, and the slots are added in order: the same bits for any number of
// threads. There are as many slots as threads, and the strips take turns, so that a slot stays in its thread's cache.
// Sums over rows, and those along a row, are fp32 in chains of bounded length and double beyond (sum_rows, kRowChain).
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/row_sums.h"
#include "base/cpu/tile.h"
#include "norm/call.h"
#include "norm/formula.h"

namespace ak {
namespace {

constexpr int64_t kStrips = 64;
constexpr int64_t kRowsPerStrip = 4;  // at least: fewer are not worth a slot

struct RowSums {
  float g = 0, gn = 0;
};
// The rest of a row, and of the sums over rows, after its whole vectors.
struct Parts {
  float x[kFloats], grad[kFloats], weight[kFloats], of_weight[kFloats], of_bias[kFloats];
};

// The sums of g and g * n over columns of a row, with n the normalized x and g the gradient of n; adds them to the sums
// over rows.
template <int kParameters>
RowSums add_row(const float* x, const float* grad, const float* weight, float mean, float rstd, float* of_weight,
                float* of_bias, int64_t columns) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    Floats g[2] = {all_lanes<Floats>(0.0f), all_lanes<Floats>(0.0f)}, gn[2] = {g[0], g[0]};
    // Adds 16 columns.
    const auto add = [&](const float* at_x, const float* at_grad, const float* at_weight, float* of_weight,
                         float* of_bias, auto lane) AK_ALWAYS_INLINE {
      Floats n, dy, w, sum;
      load_floats(at_x, n), load_floats(at_grad, dy), load_floats(at_weight, w);
      n = of_lanes([=](float v) AK_ALWAYS_INLINE { return normalized(v, mean, rstd); }, n);
      w = of_lanes([](float a, float b) AK_ALWAYS_INLINE { return a * b; }, w, dy);
      g[lane] = g[lane] + w;
      const auto add_product = [](float s, float a, float b) AK_ALWAYS_INLINE { return s + a * b; };
      gn[lane] = of_lanes(add_product, gn[lane], w, n);
      if constexpr (kParameters > 0)
        load_floats(of_weight, sum), store_floats(of_lanes(add_product, sum, dy, n), of_weight);
      if constexpr (kParameters > 1) load_floats(of_bias, sum), store_floats(sum + dy, of_bias);
    };
    const std::integral_constant<int, 0> even;
    const std::integral_constant<int, 1> odd;
    int64_t i = 0;
    for (; i + 2 * kFloats <= columns; i += 2 * kFloats) {
      const int64_t next = i + kFloats;
      add(x + i, grad + i, weight + i, of_weight + i, of_bias + i, even);
      add(x + next, grad + next, weight + next, of_weight + next, of_bias + next, odd);
    }
    if (i + kFloats <= columns) {
      add(x + i, grad + i, weight + i, of_weight + i, of_bias + i, even);
      i += kFloats;
    }
    if (i < columns) {
      Parts parts;
      part_of_lanes(x, i, columns, mean, parts.x), part_of_lanes(grad, i, columns, 0.0f, parts.grad);
      part_of_lanes(weight, i, columns, 0.0f, parts.weight);
      if constexpr (kParameters > 0) part_of_lanes(of_weight, i, columns, 0.0f, parts.of_weight);
      if constexpr (kParameters > 1) part_of_lanes(of_bias, i, columns, 0.0f, parts.of_bias);
      add(parts.x, parts.grad, parts.weight, parts.of_weight, parts.of_bias, odd);
      if constexpr (kParameters > 0) store_rest(parts.of_weight, of_weight + i, columns - i);
      if constexpr (kParameters > 1) store_rest(parts.of_bias, of_bias + i, columns - i);
    }
    return RowSums{lanes_total(g[0] + g[1]), lanes_total(gn[0] + gn[1])};
  });
}

AK_SIMD_CLONES void add_span(const float* __restrict from, float* __restrict sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] += from[i];
}

// `out` may alias x.
template <bool kAdds>
AK_SIMD_CLONES void gradient_span(const float* x, const float* grad, const float* weight, float mean, float rstd,
                                  float mean_g, float mean_gn, const float* grad_sum, float* out, int64_t n) {
  const auto gradient = [=](float v, float dy, float w) AK_ALWAYS_INLINE {
    return norm_gradient(dy * w, normalized(v, mean, rstd), rstd, mean_g, mean_gn);
  };
  if constexpr (kAdds) {
    const auto with_sum = [=](float v, float dy, float w, float added)
                              AK_ALWAYS_INLINE { return gradient(v, dy, w) + added; };
    map_lanes(n, out, with_sum, x, grad, weight, grad_sum);
  } else {
    map_lanes(n, out, gradient, x, grad, weight);
  }
}

// Writes elements [at, at + n) of the rounded `out` to the branch.
void store_branch(const NormBackward& p, int64_t at, int64_t n, float* buffer) {
  const float* values = load_tile(static_cast<const void*>(p.out), p.x_type, at, n, buffer);
  float* const result = p.branch_type == DType::kFloat32 ? static_cast<float*>(p.branch) + at : buffer;
  if (result != values) std::copy_n(values, n, result);
  store_tile(result, p.branch, p.branch_type, at, n);
}

template <int kParameters, typename X>
void backward_rows(const NormBackward& p, const float* weight, int64_t begin, int64_t end, float* sums) {
  const int64_t columns = p.columns;
  const float count = static_cast<float>(columns);
  RowBuffer grad_buffer(columns), x_buffer(columns), added_buffer(p.grad_sum ? columns : 0);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = r * columns;
    const float* grad = load_tile(p.grad, p.grad_type, at, columns, grad_buffer.get());
    const float* x = load_tile(p.x, p.x_type, at, columns, x_buffer.get());
    const float mean = p.mean ? p.mean[r] : 0.0f, rstd = p.rstd[r];
    double sum_g = 0.0, sum_gn = 0.0;
    for (int64_t c = 0; c < columns; c += kRowChain) {
      float *const of_weight = sums + c, *const of_bias = of_weight + columns;
      const RowSums chain = add_row<kParameters>(x + c, grad + c, weight + c, mean, rstd, of_weight, of_bias,
                                                 std::min(kRowChain, columns - c));
      sum_g += chain.g, sum_gn += chain.gn;
    }
    const float mean_g = p.mean ? static_cast<float>(sum_g) / count : 0.0f;
    const float mean_gn = static_cast<float>(sum_gn) / count;
    const float* added = p.grad_sum ? load_tile(p.grad_sum, p.grad_sum_type, at, columns, added_buffer.get()) : nullptr;
    make_rounded(static_cast<X*>(p.out) + at, x_buffer.get(), columns, [&](float* out) {
      if (added) {
        gradient_span<true>(x, grad, weight, mean, rstd, mean_g, mean_gn, added, out, columns);
      } else {
        gradient_span<false>(x, grad, weight, mean, rstd, mean_g, mean_gn, nullptr, out, columns);
      }
    });
    if (p.branch) store_branch(p, at, columns, grad_buffer.get());
  }
}

template <typename X>
void backward_rows(const NormBackward& p, const float* weight, int64_t begin, int64_t end, float* sums) {
  if (p.parameters == 0) return backward_rows<0, X>(p, weight, begin, end, sums);
  if (p.parameters == 1) return backward_rows<1, X>(p, weight, begin, end, sums);
  backward_rows<2, X>(p, weight, begin, end, sums);
}

// The rows [begin, end), whose sums are added to `sums`: those of the weight, then those of the bias.
void backward_rows(const NormBackward& p, const float* weight, int64_t begin, int64_t end, float* sums) {
  if (p.x_type == DType::kFloat32) return backward_rows<float>(p, weight, begin, end, sums);
  if (p.x_type == DType::kFloat16) return backward_rows<fp16>(p, weight, begin, end, sums);
  backward_rows<bf16>(p, weight, begin, end, sums);
}

}  // namespace

int64_t norm_backward_slots(int64_t, int, int) { return 0; }

AK_EXPORT Status norm_backward(const NormBackward& p, Stream) {
  const int64_t width = int64_t{p.parameters} * p.columns;
  RowBuffer scale_buffer(p.columns);
  const float* scale = values_or(p.weight, p.weight_type, 1.0f, p.columns, scale_buffer.get());
  const int64_t strips = std::clamp<int64_t>((p.rows + kRowsPerStrip - 1) / kRowsPerStrip, 1, kStrips);
  const int64_t slots = width == 0 ? strips : std::min<int64_t>(strips, torch::stable::get_num_threads());
  RowBuffer sums(slots * width);
  if (width > 0) std::fill_n(p.sums, width, 0.0f);
  const int64_t grain = std::max<int64_t>(1, strips * kGrain / std::max<int64_t>(1, p.rows * p.columns));
  for (int64_t first = 0; first < strips; first += slots) {
    const int64_t count = std::min(slots, strips - first);
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        float* const slot = sums.get() + s * width;
        const int64_t strip = first + s, from = p.rows * strip / strips, to = p.rows * (strip + 1) / strips;
        sum_rows(from, to, width, slot,
                 [&](int64_t row, int64_t last, float* of_chain) { backward_rows(p, scale, row, last, of_chain); });
      }
    });
    torch::stable::parallel_for(0, width, std::max<int64_t>(1, kGrain / count), [&](int64_t begin, int64_t end) {
      for (int64_t s = 0; s < count; ++s) add_span(sums.get() + s * width + begin, p.sums + begin, end - begin);
    });
  }
  return {};
}

}  // namespace ak
