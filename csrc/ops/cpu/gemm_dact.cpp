// gemm_dact on the CPU: dz = activation'(preact) applied to the fp32 product a @ b, and the sums of its columns.
//
// Work: the product (gemm_product.cpp), whose blocks of fp32 sums are finished in the cache: that reads the
// pre-activation and writes dz. The columns are summed within units of 64 rows, then over the units in order: the cut
// does not depend on the number of threads, so neither do the bits.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "math/activation.h"
#include "ops/activation.h"
#include "ops/check.h"
#include "ops/cpu/gemm_product.h"
#include "ops/cpu/simd.h"
#include "ops/cpu/tile.h"

namespace ak {
namespace {

template <Activation kActivation>
AK_SIMD_INLINE void backward_span(const float* grad, const float* z, float* dz, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dz[i] = activate_backward(kActivation, grad[i], z[i]);
}

AK_SIMD_INLINE void swiglu_backward_span(const float* grad, const float* gate, const float* up, float* d_gate,
                                         float* d_up, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const GatedGradient d = swiglu_backward(grad[i], gate[i], up[i]);
    d_gate[i] = d.gate;
    d_up[i] = d.up;
  }
}

AK_SIMD_INLINE void backward_span(Activation activation, const float* grad, const float* z, float* dz, int64_t n) {
  switch (activation) {
    case Activation::relu:
      return backward_span<Activation::relu>(grad, z, dz, n);
    case Activation::gelu:
      return backward_span<Activation::gelu>(grad, z, dz, n);
    case Activation::gelu_tanh:
      return backward_span<Activation::gelu_tanh>(grad, z, dz, n);
    case Activation::silu:
      return backward_span<Activation::silu>(grad, z, dz, n);
    case Activation::none:
    case Activation::swiglu:
      std::memcpy(dz, grad, static_cast<size_t>(4 * n));
  }
}

AK_SIMD_INLINE void add_span(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

struct Backward {
  Activation activation;
  int64_t columns, width;  // of the product; of preact and dz
  const void* preact;
  ScalarType preact_dtype;
  void* dz;
  ScalarType dz_dtype;
  float* sums;  // of units of rows, `width` each, or null

  // Stores `n` values of row r from `column` on, and adds them to those of its unit.
  AK_SIMD_INLINE void store(const float* values, int64_t r, int64_t unit, int64_t column, int64_t n) const {
    const int64_t at = r * width + column;
    if (dz_dtype == ScalarType::Float) std::memcpy(static_cast<float*>(dz) + at, values, static_cast<size_t>(4 * n));
    store_span(values, dz, dz_dtype, at, n);
    if (sums) add_span(values, sums + unit * width + column, n);
  }

  AK_SIMD_INLINE void row(const float* grad, int64_t r, int64_t unit, int64_t c, int64_t n) const {
    float gate_buffer[kTile], up_buffer[kTile], d_gate[kTile], d_up[kTile];
    const float* z = load_span(preact, preact_dtype, r * width + c, n, gate_buffer);
    if (is_gated(activation)) {
      const float* up = load_span(preact, preact_dtype, r * width + columns + c, n, up_buffer);
      swiglu_backward_span(grad, z, up, d_gate, d_up, n);
      store(d_up, r, unit, columns + c, n);
    } else {
      backward_span(activation, grad, z, d_gate, n);
    }
    store(d_gate, r, unit, c, n);
  }
};

AK_SIMD_CLONES void finish(const Backward& backward, const SumsBlock& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t c = 0; c < block.columns; c += kTile)
      backward.row(block.sums + i * block.stride + c, block.row + i, block.unit + i / kRowUnit, block.column + c,
                   std::min(kTile, block.columns - c));
  }
}

std::tuple<Tensor, Tensor> gemm_dact(const Tensor& a, const Tensor& b, const Tensor& preact, std::string name,
                                     bool bias_grad, std::optional<ScalarType> out_dtype, bool batch_invariant) {
  constexpr const char* op = "gemm_dact";
  check_operands(op, a, b);
  const Activation activation = activation_named(op, name);
  const ScalarType type = output_dtype(op, a, out_dtype);
  check_dtype(op, {"preact"}, preact, {a.scalar_type(), ScalarType::Float});
  std::vector<int64_t> sizes = product_sizes(a, b);
  const int64_t columns = sizes.back();
  if (is_gated(activation)) sizes.back() *= 2;
  const int64_t width = sizes.back();
  AK_CHECK(preact.is_cpu() && static_cast<size_t>(preact.dim()) == sizes.size() &&
               std::equal(sizes.begin(), sizes.end(), preact.sizes().begin()),
           op, ": preact must be a CPU tensor of shape ", Ints{sizes}, "; got ", Ints{preact.sizes()});

  const Tensor z = torch::stable::contiguous(preact);
  const Tensor dz = empty_tensor(sizes, type);
  const int64_t d = a.dim(), units = row_units(d == 3 ? a.size(0) : 1, a.size(d - 2));
  std::vector<float> partial(static_cast<size_t>(bias_grad ? units * width : 0));
  const Backward backward{activation,
                          columns,
                          width,
                          z.const_data_ptr(),
                          z.scalar_type(),
                          dz.mutable_data_ptr(),
                          type,
                          bias_grad ? partial.data() : nullptr};
  product(a, b, {.batch_invariant = batch_invariant}, [&backward](const SumsBlock& block) { finish(backward, block); });
  Tensor sums;
  if (bias_grad) {
    sums = empty_tensor({width}, ScalarType::Float);
    float* total = static_cast<float*>(sums.mutable_data_ptr());
    std::fill_n(total, width, 0.0f);
    for (int64_t unit = 0; unit < units; ++unit) add_span(partial.data() + unit * width, total, width);
  }
  return {dz, sums};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("gemm_dact", TORCH_BOX(&ak::gemm_dact)); }
