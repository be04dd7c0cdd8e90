// gemm and gemm_accumulate_ on the CPU.
//
// Work: 2 M N K flops in the fp32 product (gemm_product.cpp), whose blocks of sums are finished in the cache and
// rounded once: z = alpha * sum + bias, activation(z) + beta * residual. One loop over floats serves every combination
// of dtypes, a piece of a row at a time.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "activation/formula.h"
#include "activation/name.h"
#include "base/check.h"
#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gemm/cpu/blocked.h"
#include "gemm/cpu/call.h"
#include "gemm/cpu/product.h"

namespace ak {
namespace {

// z = alpha * z + bias, where `bias` may be null.
AK_SIMD_INLINE void finish_sums(float* z, float alpha, const float* bias, int64_t n) {
  if (bias) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias[i];
  } else {
    for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i];
  }
}

AK_SIMD_INLINE void finish_sums_of_row(float* z, float alpha, float bias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = alpha * z[i] + bias;
}

template <Activation kActivation>
AK_SIMD_INLINE void activate_span(float* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = activate(kActivation, z[i]);
}

AK_SIMD_INLINE void swiglu_span(float* gate, const float* up, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) gate[i] = swiglu(gate[i], up[i]);
}

// The result takes the place of z; `up` is for gated activations.
AK_SIMD_INLINE void activate_span(Activation activation, float* z, const float* up, int64_t n) {
  switch (activation) {
    case Activation::none:
      return;
    case Activation::relu:
      return activate_span<Activation::relu>(z, n);
    case Activation::gelu:
      return activate_span<Activation::gelu>(z, n);
    case Activation::gelu_tanh:
      return activate_span<Activation::gelu_tanh>(z, n);
    case Activation::silu:
      return activate_span<Activation::silu>(z, n);
    case Activation::swiglu:
      return swiglu_span(z, up, n);
  }
}

AK_SIMD_INLINE void add_residual(float* out, const float* residual, float beta, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = fma(beta, residual[i], out[i]);
}

// A tensor as the tiles see it; `data` is null where there is none.
struct Span {
  void* data = nullptr;
  DType dtype = DType::kFloat32;

  Span() = default;
  explicit Span(const Tensor& t) : data(t.mutable_data_ptr()), dtype(dtype_of(t.scalar_type())) {}
  Span(void* d, DType type) : data(d), dtype(type) {}
};

struct Epilogue {
  Activation activation;
  float alpha, beta;
  const float* bias;  // null, or one value per column or per row
  bool row_bias;
  int64_t m, n;                // of a matrix of sums
  Span residual, preact, out;  // contiguous

  bool in_steps() const {
    return activation == Activation::none || is_gated(activation) || row_bias || residual.data ||
           out.dtype == DType::kFloat32;
  }

  // Columns [c, c + width) of row r, all of whose sums it overwrites: z, and for gated activations the values `up`.
  AK_SIMD_INLINE void row(float* z, float* up, int64_t r, int64_t c, int64_t width) const {
    const int64_t columns = up ? n / 2 : n;
    finish_z(z, r, c, width);
    if (up) finish_z(up, r, columns + c, width);
    activate_span(activation, z, up, width);
    const int64_t at = r * columns + c;
    float buffer[kTile];
    if (residual.data) add_residual(z, load_span(residual.data, residual.dtype, at, width, buffer), beta, width);
    store(z, out, at, width);
  }

  AK_SIMD_INLINE void finish_z(float* z, int64_t r, int64_t c, int64_t width) const {
    if (row_bias) {
      finish_sums_of_row(z, alpha, bias[r % m], width);
    } else if (bias || alpha != 1.0f) {
      finish_sums(z, alpha, bias ? bias + c : nullptr, width);
    }
    if (preact.data) store(z, preact, r * n + c, width);
  }

  // Rows of fp32 results may be the sums themselves.
  static AK_SIMD_INLINE void store(const float* from, const Span& to, int64_t at, int64_t width) {
    float* const target = static_cast<float*>(to.data) + at;
    if (to.dtype == DType::kFloat32 && target != from) std::memcpy(target, from, static_cast<size_t>(4 * width));
    store_span(from, to.data, to.dtype, at, width);
  }
};

// Bias, activation and rounding of a block in one pass over its rows, where an activation is all that is asked for.
template <Activation kActivation, typename T>
AK_SIMD_INLINE void finish_at_once(const Epilogue& e, const SumsBlock& block) {
  float none[kTile];
  std::fill_n(none, std::min(kTile, block.columns), -0.0f);  // which changes no number that it is added to
  for (int64_t c = 0; c < block.columns; c += kTile) {
    const int64_t width = std::min(kTile, block.columns - c);
    const float* __restrict bias = e.bias ? e.bias + block.column + c : none;
    for (int64_t i = 0; i < block.rows; ++i) {
      const float* __restrict sums = block.sums + i * block.stride + c;
      const int64_t at = (block.row + i) * e.n + block.column + c;
      T* __restrict out = static_cast<T*>(e.out.data) + at;
      if (e.preact.data) {
        T* __restrict preact = static_cast<T*>(e.preact.data) + at;
        for (int64_t j = 0; j < width; ++j) {
          const float z = e.alpha * sums[j] + bias[j];
          preact[j] = round_to<T>(z);
          out[j] = round_to<T>(activate(kActivation, z));
        }
      } else {
        for (int64_t j = 0; j < width; ++j) out[j] = round_to<T>(activate(kActivation, e.alpha * sums[j] + bias[j]));
      }
    }
  }
}

template <typename T>
AK_SIMD_CLONES void finish_at_once(const Epilogue& e, const SumsBlock& block) {
  switch (e.activation) {
    case Activation::none:
      return finish_at_once<Activation::none, T>(e, block);
    case Activation::relu:
      return finish_at_once<Activation::relu, T>(e, block);
    case Activation::gelu:
      return finish_at_once<Activation::gelu, T>(e, block);
    case Activation::gelu_tanh:
      return finish_at_once<Activation::gelu_tanh, T>(e, block);
    case Activation::silu:
      return finish_at_once<Activation::silu, T>(e, block);
    case Activation::swiglu:
      return;
  }
}

AK_SIMD_CLONES void finish_in_steps(const Epilogue& epilogue, const SumsBlock& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t c = 0; c < block.columns; c += kTile) {
      float* z = block.sums + i * block.stride + c;
      epilogue.row(z, block.half ? z + block.half : nullptr, block.row + i, block.column + c,
                   std::min(kTile, block.columns - c));
    }
  }
}

void finish(const Epilogue& e, const SumsBlock& block) {
  if (e.in_steps()) return finish_in_steps(e, block);
  if (e.out.dtype == DType::kFloat16) return finish_at_once<fp16>(e, block);
  finish_at_once<bf16>(e, block);
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

  Epilogue e{activation, static_cast<float>(alpha), static_cast<float>(beta), nullptr, false, m, n, {}, {}, {}};
  std::optional<Floats> bias32;
  std::optional<Tensor> residual_dense;
  if (bias) {
    check_dtype(op, {"bias"}, *bias, {a.scalar_type(), ScalarType::Float});
    e.row_bias = bias->dim() == 2;
    const bool fits = e.row_bias ? bias->size(0) == m && bias->size(1) == 1 : bias->dim() == 1 && bias->size(0) == n;
    AK_CHECK(bias->is_cpu() && fits, op, ": bias must be a CPU tensor of shape (", n, ") or (", m, ", 1); got ",
             Ints{bias->sizes()});
    e.bias = bias32.emplace(*bias).data();
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

  const Tensor out = empty_tensor(sizes, type);
  e.out = Span(out);
  Tensor z;
  if (preact) {
    z = empty_tensor(product_sizes(a, b), type);
    e.preact = Span(z);
  }
  const bool gated = is_gated(activation);
  product(a, b, {batch_invariant, gated, type == ScalarType::Float && !gated ? &out : nullptr},
          [&e](const SumsBlock& block) { finish(e, block); });
  return {out, z};
}

// c[i] = alpha * acc[i] + beta * c[i] with one stride for c; beta = 0 does not read c.
AK_SIMD_INLINE void accumulate_row(float* c, const float* acc, int64_t n, int64_t stride, float alpha, float beta) {
  if (beta == 0.0f) {
    for (int64_t i = 0; i < n; ++i) c[i * stride] = alpha * acc[i];
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) c[i * stride] = fma(beta, c[i * stride], alpha * acc[i]);
  }
}

AK_SIMD_CLONES void accumulate_block(float* c, const SumsBlock& block, int64_t m, int64_t batch_stride,
                                     int64_t row_stride, int64_t column_stride, float alpha, float beta) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t r = block.row + i;
    float* row = c + r / m * batch_stride + r % m * row_stride + block.column * column_stride;
    const float* sums = block.sums + i * block.stride;
    if (column_stride == 1) {
      accumulate_row(row, sums, block.columns, 1, alpha, beta);
    } else {
      accumulate_row(row, sums, block.columns, column_stride, alpha, beta);
    }
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
  const int64_t d = c.dim(), m = c.size(d - 2);
  const int64_t batch_stride = d == 3 ? c.stride(0) : 0, row_stride = c.stride(d - 2), column_stride = c.stride(d - 1);
  float* to = static_cast<float*>(c.mutable_data_ptr());
  product(a, b, {.batch_invariant = batch_invariant}, [=](const SumsBlock& block) {
    accumulate_block(to, block, m, batch_stride, row_stride, column_stride, static_cast<float>(alpha),
                     static_cast<float>(beta));
  });
}

}  // namespace

AK_EXPORT bool gemm_call(const GemmCall& call) {
  const Isa isa = current_isa();
  if (isa == Isa::portable) return false;
  const DType type = call.out_type;
  Epilogue e{call.activation, 1.0f, 1.0f, nullptr, false, call.m, call.n, {}, {call.preact, type}, {call.out, type}};
  std::optional<Floats> bias;
  if (call.bias) e.bias = bias.emplace(call.bias, call.bias_type, call.n).data();
  const StridedMatrix &a = call.a, &b = call.b;
  product(isa, call.operands == DType::kBFloat16,
          {.a = {operand_of(a.data, call.m, a.row_stride, call.k, a.column_stride), 0},
           .b = {operand_of(b.data, call.n, b.column_stride, call.k, b.row_stride), 0},
           .batches = 1,
           .m = call.m,
           .n = call.n,
           .k = call.k,
           .halves = is_gated(call.activation) ? 2 : 1},
          [&e](const SumsBlock& block) { finish(e, block); });
  return true;
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("gemm", TORCH_BOX(&ak::gemm));
  m.impl("gemm_accumulate_", TORCH_BOX(&ak::gemm_accumulate_));
}
