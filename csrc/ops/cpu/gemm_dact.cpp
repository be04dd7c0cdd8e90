// gemm_dact on the CPU: dz = activation'(preact) applied to the fp32 product a @ b, and the sums of its columns.
//
// Work: the product (gemm_product.cpp), then one pass over its fp32 sums that reads the pre-activation and writes dz.
// The columns are summed within blocks of 64 rows, then over the blocks in order: the cut does not depend on the number
// of threads, so neither do the bits.
#include <algorithm>
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

constexpr int64_t kBlockRows = 64;

// dz may be `grad` itself.
template <Activation kActivation>
AK_SIMD_CLONES void backward_span(const float* grad, const float* z, float* dz, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dz[i] = activate_backward(kActivation, grad[i], z[i]);
}

AK_SIMD_CLONES void swiglu_backward_span(const float* grad, const float* gate, const float* up, float* d_gate,
                                         float* d_up, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const GatedGradient d = swiglu_backward(grad[i], gate[i], up[i]);
    d_gate[i] = d.gate;
    d_up[i] = d.up;
  }
}

void backward_span(Activation activation, const float* grad, const float* z, float* dz, int64_t n) {
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
      std::copy_n(grad, n, dz);
  }
}

AK_SIMD_CLONES void add_span(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

struct Backward {
  Activation activation;
  const float* product;    // rows of `columns` sums
  int64_t columns, width;  // of the product; of preact and dz
  const void* preact;
  ScalarType preact_dtype;
  void* dz;
  ScalarType dz_dtype;

  // Stores `n` values of row r from `column` on, and adds them to `sums` unless that is null.
  void store(const float* values, int64_t r, int64_t column, int64_t n, float* sums) const {
    const int64_t at = r * width + column;
    if (dz_dtype == ScalarType::Float) std::copy_n(values, n, static_cast<float*>(dz) + at);
    store_tile(values, dz, dz_dtype, at, n);
    if (sums) add_span(values, sums + column, n);
  }

  void row(int64_t r, float* sums) const {
    float gate_buffer[kTile], up_buffer[kTile], d_gate[kTile], d_up[kTile];
    for (int64_t c = 0; c < columns; c += kTile) {
      const int64_t n = std::min(kTile, columns - c);
      const float* grad = product + r * columns + c;
      const float* z = load_tile(preact, preact_dtype, r * width + c, n, gate_buffer);
      if (is_gated(activation)) {
        const float* up = load_tile(preact, preact_dtype, r * width + columns + c, n, up_buffer);
        swiglu_backward_span(grad, z, up, d_gate, d_up, n);
        store(d_up, r, columns + c, n, sums);
      } else {
        backward_span(activation, grad, z, d_gate, n);
      }
      store(d_gate, r, c, n, sums);
    }
  }
};

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

  const Tensor acc = product(a, b, batch_invariant);
  const Tensor z = torch::stable::contiguous(preact);
  const Tensor dz = torch::stable::new_empty(acc, sizes, type);
  const Backward backward{activation,
                          static_cast<const float*>(acc.const_data_ptr()),
                          columns,
                          width,
                          z.const_data_ptr(),
                          z.scalar_type(),
                          dz.mutable_data_ptr(),
                          type};
  const int64_t rows = columns == 0 ? 0 : acc.numel() / columns;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  std::vector<float> partials(static_cast<size_t>(bias_grad ? blocks * width : 0));
  float* partial = bias_grad ? partials.data() : nullptr;
  const int64_t grain = std::max<int64_t>(1, rows_per_thread(columns) / kBlockRows);
  torch::stable::parallel_for(0, blocks, grain, [&backward, partial, rows](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t r = block * kBlockRows; r < std::min(rows, (block + 1) * kBlockRows); ++r)
        backward.row(r, partial ? partial + block * backward.width : nullptr);
    }
  });
  Tensor sums;
  if (bias_grad) {
    sums = torch::stable::new_empty(acc, std::vector<int64_t>{width}, ScalarType::Float);
    float* total = static_cast<float*>(sums.mutable_data_ptr());
    std::fill_n(total, width, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) add_span(partial + block * width, total, width);
  }
  return {dz, sums};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("gemm_dact", TORCH_BOX(&ak::gemm_dact)); }
