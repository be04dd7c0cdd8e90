// softmax_rows and softmax_rows_backward on the CPU. A row is widened into a buffer that stays in the cache, where the
// passes for the largest value, the sum and the result find it. Rows are independent: the bits are the same for any
// number of threads.
#include <algorithm>

#include "math/softmax.h"
#include "ops/cpu/arguments.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/empty.h"
#include "ops/cpu/exp_sums.h"
#include "ops/cpu/softmax_call.h"
#include "ops/cpu/tile.h"
#include "ops/softmax_arguments.h"

namespace ak {
namespace {

// `to` may be x.
AK_SIMD_CLONES void mask_span(const bool* counts, float instead, const float* x, float* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i] = counts[i] ? x[i] : instead;
}

// At most kRowsTogether rows from their values, which `e` may take the place of; y may be where e is. Of log-softmax
// writes base and inverse of each row.
template <bool kLog, typename T>
AK_SIMD_CLONES void softmax_of_rows(const float* x, float* e, T* y, int64_t rows, int64_t n, bool safe, float* bases,
                                    float* inverses) {
  PerRow largest = {}, sums = {}, base, inverse, log_sum;
  for (int64_t r = 0; r < rows; ++r) largest[r] = largest_of_row(x + r * n, n);
  for (int64_t r = 0; r < rows; ++r) sums[r] = exp_row<!kLog>(x + r * n, softmax_base(largest[r]), e + r * n, n);
  for (int64_t r = 0; r < kRowsTogether; ++r) {
    const SoftmaxRow row = softmax_row(largest[r], sums[r], safe);
    base[r] = row.base;
    inverse[r] = row.inverse;
    log_sum[r] = row.log_sum;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const SoftmaxRow row{base[r], inverse[r], log_sum[r]};
    const float* from = (kLog ? x : e) + r * n;
    T* to = y + r * n;
    for_lanes(n, [=](int64_t i) __attribute__((always_inline)) {
      to[i] = round_to<T>(kLog ? log_softmax_of(row, from[i]) : softmax_of(row, from[i]));
    });
  }
  if (kLog) {
    std::copy_n(base, rows, bases);
    std::copy_n(inverse, rows, inverses);
  }
}

template <typename T>
AK_SIMD_CLONES void copy_span(const float* from, T* to, int64_t n) {
  round_span(from, to, n);
}

// The gradients of at most kRowsTogether rows; the operands are floats or bf16. `out` may be where one of them is.
template <typename T, typename Out>
AK_SIMD_CLONES void softmax_gradient_rows(const T* y, const T* g, Out* out, int64_t rows, int64_t n) {
  PerRow sums;
  for (int64_t r = 0; r < rows; ++r) {
    const T *const of = y + r * n, *const grad = g + r * n;
    sums[r] = sum_of_lanes(
        n,
        [=](int64_t i, Floats& t) __attribute__((always_inline)) {
          Floats other;
          load_floats(grad + i, t), load_floats(of + i, other), t *= other;
        },
        [=](int64_t i) __attribute__((always_inline)) { return to_float(grad[i]) * to_float(of[i]); });
  }
  for (int64_t r = 0; r < rows; ++r, y += n, g += n, out += n) {
    for_lanes(n, [=, sum = sums[r]](int64_t i) __attribute__((always_inline)) {
      out[i] = round_to<Out>(softmax_gradient(to_float(y[i]), to_float(g[i]), sum));
    });
  }
}
template <typename T, typename Out>
AK_SIMD_CLONES void log_softmax_gradient_rows(const T* x, const T* g, const float* bases, const float* inverses,
                                              Out* out, int64_t rows, int64_t n) {
  PerRow sums;
  for (int64_t r = 0; r < rows; ++r) sums[r] = sum_of_row(g + r * n, n);
  for (int64_t r = 0; r < rows; ++r, x += n, g += n, out += n) {
    for_lanes(n, [=, base = bases[r], inverse = inverses[r], sum = sums[r]](int64_t i) __attribute__((always_inline)) {
      const float y = exp_of_logit(to_float(x[i]) - base) * inverse;
      out[i] = round_to<Out>(log_softmax_gradient(y, to_float(g[i]), sum));
    });
  }
}

SoftmaxMask mask_of(const std::optional<Tensor>& t) {
  if (!t) return {};
  return {
      static_cast<const bool*>(t->const_data_ptr()), t->size(1), t->size(2), t->stride(0), t->stride(1), t->stride(2)};
}

std::tuple<Tensor, Tensor> softmax_rows(const Tensor& x, const std::optional<Tensor> mask, bool log, bool safe,
                                        ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows";
  check_softmax_matrix(op, {"x"}, x);
  check_softmax_mask(op, mask, x);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_cpu(op, {"x"}, x);
  if (mask) check_cpu(op, {"mask"}, *mask);
  const int64_t rows = x.size(0), columns = x.size(1);
  const Tensor y = empty_tensor({rows, columns}, out_dtype);
  const Tensor statistics = empty_tensor({2, log ? rows : 0}, ScalarType::Float);
  softmax_call({.x = x.const_data_ptr(),
                .x_type = x.scalar_type(),
                .mask = mask_of(mask),
                .safe = safe,
                .rows = rows,
                .columns = columns,
                .y = y.mutable_data_ptr(),
                .y_type = out_dtype,
                .statistics = log ? static_cast<float*>(statistics.mutable_data_ptr()) : nullptr});
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
  const int64_t rows = grad.size(0), columns = grad.size(1);
  const Tensor out = empty_tensor({rows, columns}, out_dtype);
  softmax_backward_call({.grad = grad.const_data_ptr(),
                         .grad_type = grad.scalar_type(),
                         .of = of.const_data_ptr(),
                         .of_type = of.scalar_type(),
                         .statistics = statistics ? static_cast<const float*>(statistics->const_data_ptr()) : nullptr,
                         .mask = mask_of(mask),
                         .rows = rows,
                         .columns = columns,
                         .grad_x = out.mutable_data_ptr(),
                         .grad_x_type = out_dtype});
  return out;
}

}  // namespace

void softmax_call(const SoftmaxCall& call) {
  const int64_t n = call.columns, block = rows_together(n);
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    const Buffer values = make_buffer(block * n), exponentials = make_buffer(block * n);
    for (int64_t first = begin; first < end; first += block) {
      const int64_t rows = std::min(block, end - first), numel = rows * n;
      const float* x = load_tile(call.x, call.x_type, first * n, numel, values.get());
      if (call.mask.data) {
        for (int64_t r = 0; r < rows; ++r)
          mask_span(call.mask.row(first + r), kMasked, x + r * n, values.get() + r * n, n);
        x = values.get();
      }
      with_dtype(call.y_type, [&]<typename T>(T) {
        make_rounded(static_cast<T*>(call.y) + first * n, exponentials.get(), numel, [&](auto* at) {
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
}

void softmax_backward_call(const SoftmaxBackwardCall& call) {
  const int64_t n = call.columns, block = rows_together(n);
  const bool direct = call.grad_type == ScalarType::BFloat16 && call.of_type == call.grad_type;  // read as they are
  torch::stable::parallel_for(0, call.rows, std::max<int64_t>(1, kGrain / 4 / n), [&](int64_t begin, int64_t end) {
    const Buffer values = make_buffer(block * n), gradients = make_buffer(block * n);
    const auto rows_of = [&](const auto* y, const auto* g, int64_t first, int64_t rows) {
      const auto make = [&](auto* at) {
        if (call.statistics) {
          const float *const bases = call.statistics + first, *const inverses = bases + call.rows;
          log_softmax_gradient_rows(y, g, bases, inverses, at, rows, n);
        } else {
          softmax_gradient_rows(y, g, at, rows, n);
        }
      };
      with_dtype(call.grad_x_type, [&]<typename T>(T) {
        T* const at = static_cast<T*>(call.grad_x) + first * n;
        if (call.statistics && call.mask.data) {
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
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("softmax_rows", TORCH_BOX(&ak::softmax_rows));
  m.impl("softmax_rows_backward", TORCH_BOX(&ak::softmax_rows_backward));
}
