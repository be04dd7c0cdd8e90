// gemm, gemm_preact and gemm_accumulate_ on the CPU.
//
// Work: 2 M N K flops in ATen's fp32 matmul, then one pass over the M N fp32 sums that adds the bias, applies the
// activation and rounds once. The operands are widened to fp32 first (exactly), so the sums are fp32 whatever the
// machine.
//
// Why not ATen's own 16-bit matmul, where no epilogue asks for the fp32 sums? For fp16 it is slower (3 to 5 times on an
// AVX-512 machine). For bf16 it is 4 times faster where the CPU has bf16 instructions, but these flush subnormal inputs
// and results to zero (2^-130 * 2^16 summed over 64 gives 0), and on other machines it takes other paths: the result
// would depend on the CPU.
//
// Traps: the product goes through the `out` overloads of ATen, which autocast leaves alone; the functional ones would
// be cast back to 16 bits when the caller is inside torch.autocast. torch.set_float32_matmul_precision("medium") also
// holds for this product: on CPUs with AMX it then rounds fp16 operands to bf16, as the user asked of every fp32
// matmul.

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "math/activation.h"
#include "math/half.h"
#include "ops/activation.h"
#include "ops/check.h"
#include "ops/cpu/simd.h"

namespace ak {
namespace {

Tensor call_out(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A batch that repeats one matrix (stride 0) is widened once and expanded again.
Tensor widen(const Tensor& t) {
  if (t.dim() == 3 && t.size(0) > 1 && t.stride(0) == 0) {
    Tensor matrix = torch::stable::to(torch::stable::select(t, 0, 0), ScalarType::Float);
    const std::vector<int64_t> sizes{t.size(0), t.size(1), t.size(2)};
    std::array<StableIValue, 3> stack{torch::stable::detail::from(matrix), torch::stable::detail::from(sizes),
                                      torch::stable::detail::from(false)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::expand", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  return torch::stable::to(t, ScalarType::Float);
}

std::vector<int64_t> product_sizes(const Tensor& a, const Tensor& b) {
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = b.size(b.dim() - 1);
  return sizes;
}

void check_operands(const char* op, const Tensor& a, const Tensor& b) {
  check_dtype(op, {"a"}, a, {ScalarType::Half, ScalarType::BFloat16});
  check_dtype(op, {"b"}, b, {a.scalar_type()});
  AK_CHECK(a.is_cpu() && b.is_cpu(), op, ": a and b must be on the CPU");
  const int64_t d = a.dim();
  AK_CHECK((d == 2 || d == 3) && b.dim() == d && a.size(d - 1) == b.size(d - 2) && (d == 2 || a.size(0) == b.size(0)),
           op, ": a and b must have shapes (M, K) and (K, N), or (B, M, K) and (B, K, N); got ", Ints{a.sizes()},
           " and ", Ints{b.sizes()});
}

// a @ b in fp32, contiguous, in memory that nothing else refers to.
Tensor product(const Tensor& a, const Tensor& b) {
  const Tensor out = torch::stable::new_empty(a, product_sizes(a, b), ScalarType::Float);
  return call_out(a.dim() == 2 ? "aten::mm" : "aten::bmm", widen(a), widen(b), out);
}

// One row of the epilogue. `z_out` may be null; `out` may be `acc` itself.
template <typename T, Activation kActivation>
AK_SIMD_CLONES void epilogue_row(const float* acc, const float* bias, T* out, T* z_out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float z = bias ? acc[i] + bias[i] : acc[i];
    if (z_out) z_out[i] = round_to<T>(z);
    out[i] = round_to<T>(activate(kActivation, z));
  }
}

template <typename T, Activation kActivation>
void epilogue(const Tensor& acc, const float* bias, const Tensor& out, const Tensor* z_out) {
  const int64_t n = acc.size(acc.dim() - 1);
  const int64_t rows = n == 0 ? 0 : acc.numel() / n;
  const float* from = static_cast<const float*>(acc.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  T* z_to = z_out ? static_cast<T*>(z_out->mutable_data_ptr()) : nullptr;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n));
  torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      epilogue_row<T, kActivation>(from + r * n, bias, to + r * n, z_to ? z_to + r * n : nullptr, n);
  });
}

template <typename T>
void epilogue(Activation activation, const Tensor& acc, const float* bias, const Tensor& out, const Tensor* z_out) {
  switch (activation) {
    case Activation::none:
      return epilogue<T, Activation::none>(acc, bias, out, z_out);
    case Activation::relu:
      return epilogue<T, Activation::relu>(acc, bias, out, z_out);
    case Activation::gelu:
      return epilogue<T, Activation::gelu>(acc, bias, out, z_out);
    case Activation::gelu_tanh:
      return epilogue<T, Activation::gelu_tanh>(acc, bias, out, z_out);
    case Activation::silu:
      return epilogue<T, Activation::silu>(acc, bias, out, z_out);
  }
}

// The product and its epilogue; the pre-activation goes to `z_out` where that is given.
Tensor run(const char* op, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
           const std::string& activation_name, std::optional<ScalarType> out_dtype, Tensor* z_out) {
  check_operands(op, a, b);
  const Activation activation = activation_named(op, activation_name);
  const ScalarType type = out_dtype.value_or(a.scalar_type());
  AK_CHECK(is_half(type) || type == ScalarType::Float, op, ": out_dtype must be float16, bfloat16 or float32; got ",
           dtype_name(type));
  std::optional<Tensor> bias32;
  if (bias) {
    check_dtype(op, {"bias"}, *bias, {a.scalar_type(), ScalarType::Float});
    AK_CHECK(bias->is_cpu() && bias->dim() == 1 && bias->size(0) == b.size(b.dim() - 1), op,
             ": bias must be a CPU tensor of ", b.size(b.dim() - 1), " elements; got shape ", Ints{bias->sizes()});
    bias32 = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
  }
  const Tensor acc = product(a, b);
  const float* bias_data = bias32 ? static_cast<const float*>(bias32->const_data_ptr()) : nullptr;
  const Tensor out = type == ScalarType::Float ? acc : torch::stable::new_empty(acc, acc.sizes(), type);
  if (z_out) *z_out = torch::stable::new_empty(acc, acc.sizes(), type);
  if (type == ScalarType::Half) {
    epilogue<fp16>(activation, acc, bias_data, out, z_out);
  } else if (type == ScalarType::BFloat16) {
    epilogue<bf16>(activation, acc, bias_data, out, z_out);
  } else if (bias_data || z_out || activation != Activation::none) {
    epilogue<float>(activation, acc, bias_data, out, z_out);
  }
  return out;
}

Tensor gemm(const Tensor& a, const Tensor& b, std::optional<Tensor> bias, std::string activation,
            std::optional<ScalarType> out_dtype) {
  return run("gemm", a, b, bias, activation, out_dtype, nullptr);
}

std::tuple<Tensor, Tensor> gemm_preact(const Tensor& a, const Tensor& b, std::optional<Tensor> bias,
                                       std::string activation, std::optional<ScalarType> out_dtype) {
  Tensor z;
  Tensor out = run("gemm_preact", a, b, bias, activation, out_dtype, &z);
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

void gemm_accumulate_(const Tensor& c, const Tensor& a, const Tensor& b, double alpha, double beta) {
  check_operands("gemm_accumulate_", a, b);
  check_dtype("gemm_accumulate_", {"c"}, c, {ScalarType::Float});
  const std::vector<int64_t> sizes = product_sizes(a, b);
  AK_CHECK(c.is_cpu() && std::equal(sizes.begin(), sizes.end(), c.sizes().begin(), c.sizes().end()),
           "gemm_accumulate_: c must be a CPU tensor of shape ", Ints{sizes}, ", the shape of a @ b; got ",
           Ints{c.sizes()});
  const Tensor acc = product(a, b);
  const int64_t d = c.dim(), m = c.size(d - 2), n = c.size(d - 1);
  const int64_t batch_stride = d == 3 ? c.stride(0) : 0, row_stride = c.stride(d - 2), column_stride = c.stride(d - 1);
  float* to = static_cast<float*>(c.mutable_data_ptr());
  const float* from = static_cast<const float*>(acc.const_data_ptr());
  const int64_t rows = n == 0 ? 0 : acc.numel() / n;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n));
  torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      accumulate_row(to + (r / m) * batch_stride + (r % m) * row_stride, from + r * n, n, column_stride,
                     static_cast<float>(alpha), static_cast<float>(beta));
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("gemm", TORCH_BOX(&ak::gemm));
  m.impl("gemm_preact", TORCH_BOX(&ak::gemm_preact));
  m.impl("gemm_accumulate_", TORCH_BOX(&ak::gemm_accumulate_));
}
