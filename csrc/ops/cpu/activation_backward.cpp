// activation_backward on the CPU: the gradient of the pre-activation z, grad * activation'(z), elementwise in fp32,
// rounded once. Work: reads grad and z, writes as much as z. An expanded grad (that of a sum) is made contiguous first.
#include <algorithm>
#include <string>
#include <vector>

#include "math/activation.h"
#include "math/half.h"
#include "ops/activation.h"
#include "ops/check.h"
#include "ops/cpu/simd.h"

namespace ak {
namespace {

template <typename G, typename Z, Activation kActivation>
AK_SIMD_CLONES void backward_span(const G* grad, const Z* z, Z* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i)
    out[i] = round_to<Z>(activate_backward(kActivation, to_float(grad[i]), to_float(z[i])));
}

// Rows of `columns` gradients, against rows of as many gates and then as many values in z and out.
template <typename G, typename Z>
AK_SIMD_CLONES void swiglu_backward_row(const G* grad, const Z* z, Z* out, int64_t columns) {
#pragma GCC ivdep
  for (int64_t i = 0; i < columns; ++i) {
    const GatedGradient d = swiglu_backward(to_float(grad[i]), to_float(z[i]), to_float(z[columns + i]));
    out[i] = round_to<Z>(d.gate);
    out[columns + i] = round_to<Z>(d.up);
  }
}

template <typename G, typename Z>
void swiglu_backward(const Tensor& grad, const Tensor& z, const Tensor& out) {
  const G* g = static_cast<const G*>(grad.const_data_ptr());
  const Z* from = static_cast<const Z*>(z.const_data_ptr());
  Z* to = static_cast<Z*>(out.mutable_data_ptr());
  const int64_t columns = z.size(z.dim() - 1) / 2, rows = columns == 0 ? 0 : z.numel() / (2 * columns);
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      swiglu_backward_row<G, Z>(g + r * columns, from + 2 * r * columns, to + 2 * r * columns, columns);
  });
}

template <typename G, typename Z, Activation kActivation>
void backward(const Tensor& grad, const Tensor& z, const Tensor& out) {
  const G* g = static_cast<const G*>(grad.const_data_ptr());
  const Z* from = static_cast<const Z*>(z.const_data_ptr());
  Z* to = static_cast<Z*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, z.numel(), 32768, [=](int64_t begin, int64_t end) {
    backward_span<G, Z, kActivation>(g + begin, from + begin, to + begin, end - begin);
  });
}

template <typename G, typename Z>
void backward(Activation activation, const Tensor& grad, const Tensor& z, const Tensor& out) {
  switch (activation) {
    case Activation::none:
      return backward<G, Z, Activation::none>(grad, z, out);
    case Activation::relu:
      return backward<G, Z, Activation::relu>(grad, z, out);
    case Activation::gelu:
      return backward<G, Z, Activation::gelu>(grad, z, out);
    case Activation::gelu_tanh:
      return backward<G, Z, Activation::gelu_tanh>(grad, z, out);
    case Activation::silu:
      return backward<G, Z, Activation::silu>(grad, z, out);
    case Activation::swiglu:
      return swiglu_backward<G, Z>(grad, z, out);
  }
}

template <typename Z>
void backward(Activation activation, const Tensor& grad, const Tensor& z, const Tensor& out) {
  if (grad.scalar_type() == ScalarType::Float) return backward<float, Z>(activation, grad, z, out);
  return backward<Z, Z>(activation, grad, z, out);
}

Tensor activation_backward(const Tensor& grad, const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_backward";
  check_dtype(op, {"preact"}, preact, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_dtype(op, {"grad"}, grad, {preact.scalar_type(), ScalarType::Float});
  AK_CHECK(grad.is_cpu() && preact.is_cpu(), op, ": grad and preact must be on the CPU");
  const Activation activation = activation_named(op, name);
  std::vector<int64_t> sizes(preact.sizes().begin(), preact.sizes().end());
  if (is_gated(activation)) {
    AK_CHECK(!sizes.empty() && sizes.back() % 2 == 0, op, ": preact must have an even number of columns with '", name,
             "'; got ", Ints{preact.sizes()});
    sizes.back() /= 2;
  }
  AK_CHECK(grad.sizes().size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), grad.sizes().begin()), op,
           ": grad must have the shape of ", name, "(preact), ", Ints{sizes}, "; got ", Ints{grad.sizes()});
  const Tensor g = torch::stable::contiguous(grad), z = torch::stable::contiguous(preact);
  const Tensor out = torch::stable::new_empty(z, z.sizes());
  if (z.scalar_type() == ScalarType::Half) {
    backward<fp16>(activation, g, z, out);
  } else if (z.scalar_type() == ScalarType::BFloat16) {
    backward<bf16>(activation, g, z, out);
  } else {
    backward<float>(activation, g, z, out);
  }
  return out;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("activation_backward", TORCH_BOX(&ak::activation_backward)); }
