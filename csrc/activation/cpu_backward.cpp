// activation_backward on the CPU: the gradient of the pre-activation z, grad * activation'(z), elementwise in fp32,
// rounded once. Work: reads grad and z, writes as much as z. An expanded grad (that of a sum) is made contiguous first.
//
// For a caller in C++ the columns of the result are summed on the way, while it is in the cache: the gradient of a
// bias.
#include <algorithm>
#include <string>

#include "activation/arguments.h"
#include "activation/cpu_call.h"
#include "activation/cpu_gradient.h"
#include "base/check.h"
#include "gemm/cpu/column_sums.h"
#include "gemm/cpu/isa.h"

namespace ak {
namespace {

struct Backward {
  ActivationGradient gradient;
  const void* grad;
  ScalarType grad_dtype;
};

// Elements [begin, end) of grad, all of one row.
AK_SIMD_INLINE void backward_span(const Backward& b, int64_t row, int64_t begin, int64_t end) {
  const int64_t columns = b.gradient.columns;
  float buffer[kTile];
  for (int64_t c = begin; c < end; c += kTile) {
    const int64_t n = std::min(kTile, end - c);
    const float* grad = load_span(b.grad, b.grad_dtype, row * columns + c, n, buffer);
    b.gradient.span(grad, row, c, n, [](const float*, int64_t, int64_t) {});
  }
}

// Where nothing is gated, rows are no more than a stretch of memory.
AK_SIMD_CLONES void backward_rows(const Backward& b, int64_t begin, int64_t end) {
  const int64_t columns = b.gradient.columns;
  if (!is_gated(b.gradient.activation)) return backward_span(b, 0, begin * columns, end * columns);
  for (int64_t row = begin; row < end; ++row) backward_span(b, row, 0, columns);
}

Backward backward_of(Activation activation, int64_t width, const void* grad, ScalarType grad_dtype, const void* preact,
                     void* dz, ScalarType dtype) {
  return {{activation, is_gated(activation) ? width / 2 : width, width, preact, dtype, dz, dtype}, grad, grad_dtype};
}

constexpr int64_t kElementsPerThread = 32768;

Tensor activation_backward(const Tensor& grad, const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_backward";
  const Activation activation = activation_named(op, name);
  check_activation_gradient(op, activation, grad, preact);
  AK_CHECK(grad.is_cpu() && preact.is_cpu(), op, ": grad and preact must be on the CPU");
  const Tensor g = torch::stable::contiguous(grad), z = torch::stable::contiguous(preact);
  const Tensor out = torch::stable::new_empty(z, z.sizes());
  const int64_t width = is_gated(activation) ? z.size(z.dim() - 1) : 1;
  const Backward b = backward_of(activation, width, g.const_data_ptr(), g.scalar_type(), z.const_data_ptr(),
                                 out.mutable_data_ptr(), z.scalar_type());
  torch::stable::parallel_for(0, width == 0 ? 0 : z.numel() / width,
                              std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, width)),
                              [&](int64_t begin, int64_t end) { backward_rows(b, begin, end); });
  return out;
}

}  // namespace

bool activation_backward_call(const ActivationBackwardCall& call) {
  if (current_isa() == Isa::portable) return false;
  const int64_t width = call.width;
  const Backward b = backward_of(call.activation, width, call.grad, call.type, call.preact, call.dz, call.type);
  const int64_t together =
      std::max<int64_t>(4, 4 * kTile / std::max<int64_t>(1, width));  // rows that the L1 cache keeps
  sum_columns(call.rows, width, call.sums, [&](int64_t begin, int64_t end, float* sums) {
    for (int64_t row = begin; row < end; row += together) {
      const int64_t last = std::min(end, row + together);
      backward_rows(b, row, last);
      add_rows(static_cast<const char*>(call.dz) + row * width * bytes_of(call.type), call.type, last - row, width,
               sums);
    }
  });
  return true;
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("activation_backward", TORCH_BOX(&ak::activation_backward)); }
