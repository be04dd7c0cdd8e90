// gemm and gemm_accumulate_ on the CPU.
//
// Work: 2 M N K flops in the fp32 product (gemm_product.cpp), then one pass over the M N fp32 sums that finishes them
// and rounds once: z = alpha * sum + bias, activation(z) + beta * residual. The pass walks tiles of a row that stay in
// the L1 cache, so one loop over floats serves every combination of dtypes.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "math/activation.h"
#include "math/half.h"
#include "ops/activation.h"
#include "ops/check.h"
#include "ops/cpu/gemm_product.h"
#include "ops/cpu/simd.h"
#include "ops/cpu/tile.h"

namespace ak {
namespace {

// z = alpha * z + bias, where `bias` may be null.
AK_SIMD_CLONES void finish_sums(float* z, float alpha, const float* bias, int64_t n) {
  if (bias) {
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias[i];
  } else {
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i];
  }
}

AK_SIMD_CLONES void finish_sums_of_row(float* z, float alpha, float bias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias;
}

template <Activation kActivation>
AK_SIMD_CLONES void activate_span(const float* z, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = activate(kActivation, z[i]);
}

AK_SIMD_CLONES void swiglu_span(const float* gate, const float* up, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = swiglu(gate[i], up[i]);
}

// `up` is for gated activations; `out` may be `z` for the others.
void activate_span(Activation activation, const float* z, const float* up, float* out, int64_t n) {
  switch (activation) {
    case Activation::none:
      if (out != z) std::copy_n(z, n, out);
      return;
    case Activation::relu:
      return activate_span<Activation::relu>(z, out, n);
    case Activation::gelu:
      return activate_span<Activation::gelu>(z, out, n);
    case Activation::gelu_tanh:
      return activate_span<Activation::gelu_tanh>(z, out, n);
    case Activation::silu:
      return activate_span<Activation::silu>(z, out, n);
    case Activation::swiglu:
      return swiglu_span(z, up, out, n);
  }
}

AK_SIMD_CLONES void add_residual(float* out, const float* residual, float beta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = fma(beta, residual[i], out[i]);
}

// A tensor as the tiles see it; `data` is null where there is none.
struct Span {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Float;

  Span() = default;
  explicit Span(const Tensor& t) : data(t.mutable_data_ptr()), dtype(t.scalar_type()) {}
};

struct Epilogue {
  Activation activation;
  float alpha, beta;
  const float* bias;  // null, or one value per column or per row
  bool row_bias;
  Span residual, preact, out;  // contiguous
};

// One row of n fp32 sums, which it overwrites; row `r` of all, row `m` of its matrix.
void finish_row(const Epilogue& e, float* z, int64_t r, int64_t m, int64_t n) {
  const bool gated = is_gated(e.activation);
  const int64_t columns = gated ? n / 2 : n;
  float result[kTile], added[kTile];
  for (int64_t c = 0; c < columns; c += kTile) {
    const int64_t width = std::min(kTile, columns - c);
    for (int64_t half = c; half < n; half += columns) {  // once, or for gates and values
      if (e.row_bias) {
        finish_sums_of_row(z + half, e.alpha, e.bias[m], width);
      } else if (e.bias || e.alpha != 1.0f) {
        finish_sums(z + half, e.alpha, e.bias ? e.bias + half : nullptr, width);
      }
      if (e.preact.data) {
        float* to = e.preact.dtype == ScalarType::Float ? static_cast<float*>(e.preact.data) + r * n + half : nullptr;
        if (to) std::copy_n(z + half, width, to);
        store_tile(z + half, e.preact.data, e.preact.dtype, r * n + half, width);
      }
    }
    const int64_t at = r * columns + c;
    // fp32 results are written where they belong: beside z, or over it.
    float* to = e.out.dtype == ScalarType::Float ? static_cast<float*>(e.out.data) + at : result;
    activate_span(e.activation, z + c, z + columns + c, to, width);
    if (e.residual.data)
      add_residual(to, load_tile(e.residual.data, e.residual.dtype, at, width, added), e.beta, width);
    store_tile(to, e.out.data, e.out.dtype, at, width);
  }
}

// `z` is undefined unless it is asked for: even an empty tensor takes a microsecond to make.
std::tuple<Tensor, Tensor> gemm(const Tensor& a, const Tensor& b, std::optional<Tensor> bias,
                                std::optional<Tensor> residual, double alpha, double beta, std::string activation_name,
                                std::optional<ScalarType> out_dtype, bool batch_invariant, bool preact) {
  constexpr const char* op = "gemm";
  check_operands(op, a, b);
  const Activation activation = activation_named(op, activation_name);
  const ScalarType type = output_dtype(op, a, out_dtype);
  const int64_t m = a.size(a.dim() - 2), n = b.size(b.dim() - 1);
  AK_CHECK(!is_gated(activation) || n % 2 == 0, op, ": b must have an even number of columns with activation='",
           activation_name, "'; got ", n);
  std::vector<int64_t> sizes = product_sizes(a, b);
  if (is_gated(activation)) sizes.back() = n / 2;

  Epilogue e{activation, static_cast<float>(alpha), static_cast<float>(beta), nullptr, false, {}, {}, {}};
  std::optional<Tensor> bias32, residual_dense;
  if (bias) {
    check_dtype(op, {"bias"}, *bias, {a.scalar_type(), ScalarType::Float});
    e.row_bias = bias->dim() == 2;
    const bool fits = e.row_bias ? bias->size(0) == m && bias->size(1) == 1 : bias->dim() == 1 && bias->size(0) == n;
    AK_CHECK(bias->is_cpu() && fits, op, ": bias must be a CPU tensor of shape (", n, ") or (", m, ", 1); got ",
             Ints{bias->sizes()});
    bias32 = contiguous_float(*bias);
    e.bias = static_cast<const float*>(bias32->const_data_ptr());
  }
  if (residual) {
    check_dtype(op, {"residual"}, *residual, {a.scalar_type(), ScalarType::Float});
    AK_CHECK(residual->is_cpu() && static_cast<size_t>(residual->dim()) == sizes.size() &&
                 std::equal(sizes.begin(), sizes.end(), residual->sizes().begin()),
             op, ": residual must be a CPU tensor of shape ", Ints{sizes}, "; got ", Ints{residual->sizes()});
    if (beta != 0) {
      residual_dense = torch::stable::contiguous(*residual);
      e.residual = Span(*residual_dense);
    }
  }

  const Tensor acc = product(a, b, batch_invariant);
  const bool over_sums = type == ScalarType::Float && !is_gated(activation);
  const Tensor out = over_sums ? acc : torch::stable::new_empty(acc, sizes, type);
  e.out = Span(out);
  Tensor z;
  if (preact) {
    z = torch::stable::new_empty(acc, acc.sizes(), type);
    e.preact = Span(z);
  }
  float* sums = static_cast<float*>(acc.mutable_data_ptr());
  const int64_t rows = n == 0 ? 0 : acc.numel() / n;
  torch::stable::parallel_for(0, rows, rows_per_thread(n), [&e, sums, m, n](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) finish_row(e, sums + r * n, r, r % m, n);
  });
  return {out, z};
}

// c[i] = alpha * acc[i] + beta * c[i] with one stride for c; beta = 0 does not read c.
AK_SIMD_CLONES void accumulate_row(float* c, const float* acc, int64_t n, int64_t stride, float alpha, float beta) {
  if (beta == 0.0f) {
    for (int64_t i = 0; i < n; ++i) c[i * stride] = alpha * acc[i];
  } else {
    for (int64_t i = 0; i < n; ++i) c[i * stride] = fma(beta, c[i * stride], alpha * acc[i]);
  }
}

void gemm_accumulate_(const Tensor& c, const Tensor& a, const Tensor& b, double alpha, double beta,
                      bool batch_invariant) {
  check_operands("gemm_accumulate_", a, b);
  check_dtype("gemm_accumulate_", {"c"}, c, {ScalarType::Float});
  const std::vector<int64_t> sizes = product_sizes(a, b);
  AK_CHECK(c.is_cpu() && static_cast<size_t>(c.dim()) == sizes.size() &&
               std::equal(sizes.begin(), sizes.end(), c.sizes().begin()),
           "gemm_accumulate_: c must be a CPU tensor of shape ", Ints{sizes}, ", the shape of a @ b; got ",
           Ints{c.sizes()});
  const Tensor acc = product(a, b, batch_invariant);
  const int64_t d = c.dim(), m = c.size(d - 2), n = c.size(d - 1);
  const int64_t batch_stride = d == 3 ? c.stride(0) : 0, row_stride = c.stride(d - 2), column_stride = c.stride(d - 1);
  float* to = static_cast<float*>(c.mutable_data_ptr());
  const float* from = static_cast<const float*>(acc.const_data_ptr());
  const int64_t rows = n == 0 ? 0 : acc.numel() / n;
  torch::stable::parallel_for(0, rows, rows_per_thread(n), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      accumulate_row(to + (r / m) * batch_stride + (r % m) * row_stride, from + r * n, n, column_stride,
                     static_cast<float>(alpha), static_cast<float>(beta));
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("gemm", TORCH_BOX(&ak::gemm));
  m.impl("gemm_accumulate_", TORCH_BOX(&ak::gemm_accumulate_));
}
