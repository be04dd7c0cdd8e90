// gemm_dact on the CPU: dz = activation'(preact) applied to the fp32 product a @ b, and the sums of its columns.
//
// Work: the product (gemm_product.cpp), whose blocks of fp32 sums are finished in the cache: that reads the
// pre-activation and writes dz. The columns are summed within units of 64 rows, then over the units in order: the cut
// does not depend on the number of threads, so neither do the bits.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activation/cpu_gradient.h"
#include "activation/name.h"
#include "base/check.h"
#include "base/cpu/column_sums.h"
#include "gemm/cpu/product.h"

namespace ak {
namespace {

struct Backward {
  ActivationGradient gradient;
  float* sums;  // of units of rows, `width` each, or null

  AK_SIMD_INLINE void row(const float* grad, int64_t r, int64_t unit, int64_t c, int64_t n) const {
    gradient.span(grad, r, c, n, [&](const float* dz, int64_t column, int64_t some) __attribute__((always_inline)) {
      if (!sums) return;
      float* __restrict to = sums + unit * gradient.width + column;
      for (int64_t i = 0; i < some; ++i) to[i] += dz[i];
    });
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
  const Backward backward{{activation, columns, width, z.const_data_ptr(), dtype_of(z.scalar_type()),
                           dz.mutable_data_ptr(), dtype_of(type)},
                          bias_grad ? partial.data() : nullptr};
  product(a, b, {.batch_invariant = batch_invariant}, [&backward](const SumsBlock& block) { finish(backward, block); });
  Tensor sums;
  if (bias_grad) {
    sums = empty_tensor({width}, ScalarType::Float);
    float* total = static_cast<float*>(sums.mutable_data_ptr());
    std::fill_n(total, width, 0.0f);
    add_rows(partial.data(), DType::kFloat32, units, width, total);
  }
  return {dz, sums};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("gemm_dact", TORCH_BOX(&ak::gemm_dact)); }
