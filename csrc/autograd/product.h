// The computations of linear and matmul: 16-bit copies of operands and their product, on a CPU by gemm/call.h, on a GPU
// by the op.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "activation/call.h"
#include "activation/name.h"
#include "autograd/plain.h"
#include "base/cpu/isa.h"
#include "column_sums/call.h"
#include "gemm/call.h"
#include "gemm/operand.h"

namespace ak {
namespace {

// ---- casts

// True if autocast's copy of a weight is up to date. Copies of dead weights are removed when the table has grown to
// twice its size.
class SeenCopies {
 public:
  bool is_of(const Tensor& copy, const Tensor& weight) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (seen_.size() > most_) {
      std::erase_if(seen_, [](const auto& entry) { return entry.second.copy.expired(); });
      most_ = 2 * seen_.size() + 64;
    }
    Seen& seen = seen_.try_emplace(weight.unsafeGetTensorImpl(), copy, weight).first->second;
    if (seen.copy.expired() || seen.copy.lock().get() != copy.unsafeGetTensorImpl()) seen = Seen(copy, weight);
    return seen.version == weight._version() && seen.address == weight.const_data_ptr();
  }

 private:
  struct Seen {
    c10::weak_intrusive_ptr<c10::TensorImpl> copy;
    int64_t version;
    const void* address;

    Seen(const Tensor& of, const Tensor& weight)
        : copy(of.getIntrusivePtr()), version(weight._version()), address(weight.const_data_ptr()) {}
  };
  std::mutex mutex_;
  std::unordered_map<c10::TensorImpl*, Seen> seen_;
  size_t most_ = 64;
};

struct Copy {
  Tensor tensor;
  bool reaches;  // autograd gets from the tensor to what it was made of
};

// Not from the cache on a GPU: a graph that is captured in the region would keep a copy that was made before.
Copy cast(const Tensor& t, ScalarType dtype, bool autocast) {
  if (t.scalar_type() == dtype) return {t, true};
  if (autocast && t.is_cpu() && t.requires_grad() && t.is_leaf() && !t.is_inference() &&
      !c10::InferenceMode::is_enabled()) {
    static SeenCopies seen;
    // With its graph also where no gradient is recorded: the cache takes no other, and a loop of inference gains from
    // it.
    const at::AutoGradMode recorded(true);
    const Tensor copy = at::autocast::cached_cast(dtype, t, at::kCPU);
    if (copy.requires_grad() && seen.is_of(copy, t)) return {copy, true};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return {t.to(dtype), false};
}

// ---- products

// A tensor [..., columns] as a matrix that is contiguous along one dimension.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;
  bool transposed = false;  // it is the transpose of `tensor`

  explicit Matrix(const Tensor& t) : tensor(t.dim() == 2 ? t : flat(t)) {
    describe();
    if (!layout(true)) tensor = tensor.contiguous(), describe();
  }

  Matrix t() const {
    Matrix other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row_stride, other.column_stride);
    other.transposed = !transposed;
    return other;
  }

  Tensor view() const { return transposed ? tensor.t() : tensor; }
  const void* data() const { return tensor.const_data_ptr(); }

  // As an operand of a product over its columns or rows.
  std::optional<GemmOperand> layout(bool over_columns) const {
    return over_columns ? gemm_operand(columns, column_stride, rows, row_stride)
                        : gemm_operand(rows, row_stride, columns, column_stride);
  }

 private:
  void describe() {
    rows = tensor.size(0), columns = tensor.size(1);
    row_stride = tensor.stride(0), column_stride = tensor.stride(1);
  }
  static Tensor flat(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }
};

std::pair<Tensor, Tensor> multiply_on_gpu(const Matrix& a, const Matrix& b, const std::optional<Tensor>& bias,
                                          Activation activation, bool with_preact, ScalarType out_type,
                                          at::IntArrayRef like) {
  using Op = std::tuple<Tensor, Tensor>(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                                        const std::optional<Tensor>& residual, double alpha, double beta,
                                        c10::string_view activation, std::optional<ScalarType> out_dtype,
                                        bool batch_invariant, bool preact);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("amp_kernels::gemm", "").typed<Op>();
  const auto out_dtype = out_type == a.tensor.scalar_type() ? std::nullopt : std::optional(out_type);
  const auto [out, preact] = op.call(a.view(), b.view(), bias, std::nullopt, 1.0, 1.0, name_of(activation), out_dtype,
                                     /*batch_invariant=*/false, with_preact);
  const auto shaped = [&](const Tensor& rows) {
    at::DimVector sizes(like.begin(), like.end());
    sizes.back() = rows.size(1);
    return like.size() == 2 ? rows : rows.view(sizes);
  };
  return {shaped(out), with_preact ? shaped(preact) : Tensor()};
}

// activation(a @ b + bias), shaped as `like` with its last dimension replaced, and if asked for a @ b + bias. Undefined
// if a size is too large.
std::pair<Tensor, Tensor> multiply(const Matrix& a, const Matrix& b, const std::optional<Tensor>& bias,
                                   Activation activation, bool with_preact, ScalarType out_type, at::IntArrayRef like) {
  if (a.tensor.is_cuda()) return multiply_on_gpu(a, b, bias, activation, with_preact, out_type, like);
  RECORD_FUNCTION("amp_kernels::gemm", c10::ArrayRef<const c10::IValue>{});
  at::DimVector sizes(like.begin(), like.end());
  const auto empty = [&](int64_t columns) {
    sizes.back() = columns;
    return empty_cpu(sizes, out_type);
  };
  if (std::max({a.rows, a.columns, b.columns}) > kMostGemmSize) return {};
  Tensor out = empty(is_gated(activation) ? b.columns / 2 : b.columns);
  Tensor preact = with_preact ? empty(b.columns) : Tensor();
  const auto rows_of = [](const Tensor& t, int64_t columns) {
    return GemmValues{const_cast<void*>(address_of(t)), type_of(t), columns, 1, 0};
  };
  const GemmOperand a_lies = *a.layout(true), b_lies = *b.layout(false);
  GemmProblem q{.a = a.data(),
                .b = b.data(),
                .type = type_of(a.tensor),
                .c = rows_of(out, out.size(-1)),
                .m = static_cast<int>(a.rows),
                .n = static_cast<int>(b.columns),
                .k = static_cast<int>(a.columns),
                .ld_a = a_lies.ld,
                .ld_b = b_lies.ld,
                .m_major_a = !a_lies.k_contiguous,
                .n_major_b = !b_lies.k_contiguous};
  q.epilogue.activation = activation;
  q.epilogue.z = rows_of(preact, b.columns);
  if (bias) q.epilogue.bias = {const_cast<void*>(bias->const_data_ptr()), type_of(*bias), 0, bias->stride(0)};
  return gemm_cpu(q, nullptr).ok() ? std::pair{out, preact} : std::pair<Tensor, Tensor>{};
}

Tensor multiply(const Matrix& a, const Matrix& b, ScalarType out_type, at::IntArrayRef like) {
  return multiply(a, b, std::nullopt, Activation::none, false, out_type, like).first;
}

// ---- gradients of the pre-activation

struct PreactivationGradient {
  Matrix dz;
  Tensor sums;  // of its columns, in fp32
};

std::tuple<Tensor, Tensor> gradient_and_sums(const Tensor& grad, const Tensor& preact, Activation activation,
                                             bool with_sums) {
  using Op =
      std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& preact, c10::string_view activation, bool bias_grad);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("amp_kernels::activation_backward", "").typed<Op>();
  return op.call(grad, preact, name_of(activation), with_sums);
}

Tensor bias_sums(const Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("amp_kernels::column_sums", "").typed<Tensor(const Tensor&)>();
  return op.call(x);
}

// On a CPU without the dispatcher: a call costs less.
PreactivationGradient preactivation_gradient(const Tensor& grad, const Tensor& preact, Activation activation,
                                             bool with_sums) {
  const bool is_own = activation == Activation::none;
  if (!with_sums || grad.is_cuda() || current_isa() == Isa::portable) {
    if (!is_own) {
      const auto [dz, sums] = gradient_and_sums(grad, preact, activation, with_sums);
      return {Matrix(dz), sums};
    }
    const Matrix dz(grad);
    return {dz, with_sums ? bias_sums(dz.tensor) : Tensor()};
  }
  RECORD_FUNCTION(is_own ? "amp_kernels::column_sums" : "amp_kernels::activation_backward",
                  c10::ArrayRef<const c10::IValue>{});
  const auto own = is_own ? std::optional<Matrix>(grad) : std::nullopt;
  const Tensor dense = (own ? own->tensor : grad).contiguous(), z = is_own ? dense : preact.contiguous();
  const int64_t width = z.size(-1), rows = z.numel() / std::max<int64_t>(1, width);
  const Tensor dz = is_own ? Tensor() : empty_cpu(z.sizes(), z.scalar_type()), sums = empty_cpu({width}, at::kFloat);
  float* const to = static_cast<float*>(sums.mutable_data_ptr());
  if (is_own) {  // nothing on a CPU fails
    (void)column_sums({.x = dense.const_data_ptr(),
                       .sums = to,
                       .slots = nullptr,
                       .type = type_of(dense),
                       .rows = rows,
                       .pitch = width,
                       .columns = static_cast<int>(width)},
                      nullptr);
    return {*own, sums};
  }
  (void)activation_backward({.grad = dense.const_data_ptr(),
                             .z = z.const_data_ptr(),
                             .out = dz.mutable_data_ptr(),
                             .grad_type = type_of(dense),
                             .type = type_of(z),
                             .rows = rows,
                             .columns = width,
                             .activation = activation,
                             .sums = to},
                            nullptr);
  return {Matrix(dz), sums};
}

}  // namespace
}  // namespace ak
