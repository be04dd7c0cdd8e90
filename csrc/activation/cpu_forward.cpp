// activation_forward on the CPU: activation(z), elementwise in fp32, rounded once. Work: reads z, writes as much, or
// half as much with swiglu.
#include <algorithm>
#include <string>

#include "activation/arguments.h"
#include "activation/formula.h"
#include "base/cpu/tile.h"

namespace ak {
namespace {

template <typename Z, Activation kActivation>
AK_SIMD_CLONES void forward_span(const Z* z, Z* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<Z>(activate(kActivation, to_float(z[i])));
}

// A row of as many gates and then as many values.
template <typename Z>
AK_SIMD_CLONES void swiglu_row(const Z* z, Z* out, int64_t columns) {
#pragma GCC ivdep
  for (int64_t i = 0; i < columns; ++i) out[i] = round_to<Z>(swiglu(to_float(z[i]), to_float(z[columns + i])));
}

template <typename Z, Activation kActivation>
void forward(const Tensor& z, const Tensor& out) {
  const Z* from = static_cast<const Z*>(z.const_data_ptr());
  Z* to = static_cast<Z*>(out.mutable_data_ptr());
  if constexpr (kActivation == Activation::swiglu) {
    const int64_t columns = out.size(out.dim() - 1), rows = columns == 0 ? 0 : out.numel() / columns;
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
    torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) swiglu_row(from + 2 * r * columns, to + r * columns, columns);
    });
  } else {
    torch::stable::parallel_for(0, z.numel(), 32768, [=](int64_t begin, int64_t end) {
      forward_span<Z, kActivation>(from + begin, to + begin, end - begin);
    });
  }
}

template <typename Z>
void forward(Activation activation, const Tensor& z, const Tensor& out) {
  switch (activation) {
    case Activation::none:
      return forward<Z, Activation::none>(z, out);
    case Activation::relu:
      return forward<Z, Activation::relu>(z, out);
    case Activation::gelu:
      return forward<Z, Activation::gelu>(z, out);
    case Activation::gelu_tanh:
      return forward<Z, Activation::gelu_tanh>(z, out);
    case Activation::silu:
      return forward<Z, Activation::silu>(z, out);
    case Activation::swiglu:
      return forward<Z, Activation::swiglu>(z, out);
  }
}

Tensor activation_forward(const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_forward";
  const Activation activation = activation_named(op, name);
  const std::vector<int64_t> sizes = activated_sizes(op, activation, preact);
  AK_CHECK(preact.is_cpu(), op, ": preact must be on the CPU");
  const Tensor z = torch::stable::contiguous(preact);
  const Tensor out = torch::stable::new_empty(z, sizes);
  with_dtype(z.scalar_type(), [&]<typename Z>(Z) { forward<Z>(activation, z, out); });
  return out;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("activation_forward", TORCH_BOX(&ak::activation_forward)); }
