// What linear and matmul in C++ (nodes.cpp) compute with: 16-bit copies of operands, and their product by pointers.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "ops/cpu/gemm_call.h"

namespace ak {
namespace {

using at::ScalarType;
using at::Tensor;

// ---- casts

// Whether autocast's copy of a weight was made of the weight as it is. Copies of weights that have died are forgotten
// when the table has grown to twice its size.
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

Copy cast(const Tensor& t, ScalarType dtype, bool autocast) {
  if (t.scalar_type() == dtype) return {t, true};
  if (autocast && t.requires_grad() && t.is_leaf() && !t.is_inference() && !c10::InferenceMode::is_enabled()) {
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

Float float_of(ScalarType type) {
  return type == ScalarType::Half ? Float::fp16 : type == ScalarType::BFloat16 ? Float::bf16 : Float::fp32;
}

// A tensor [..., columns] as a matrix with one unit stride.
struct Matrix {
  Tensor tensor;
  int64_t rows, columns, row_stride, column_stride;

  explicit Matrix(const Tensor& t) : tensor(t.dim() == 2 ? t : flat(t)) {
    if (!has_unit_stride()) tensor = tensor.contiguous();
    rows = tensor.size(0), columns = tensor.size(1);
    row_stride = tensor.stride(0), column_stride = tensor.stride(1);
  }

  Matrix t() const {
    Matrix other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row_stride, other.column_stride);
    return other;
  }

  StridedMatrix strided() const { return {tensor.const_data_ptr(), row_stride, column_stride}; }

 private:
  static Tensor flat(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }
  bool has_unit_stride() const {
    return tensor.stride(0) == 1 || tensor.size(0) == 1 || tensor.stride(1) == 1 || tensor.size(1) == 1;
  }
};

// activation(a @ b + bias), shaped as `like` with its last dimension replaced, and where it is asked for a @ b + bias.
// Undefined on the portable path.
std::pair<Tensor, Tensor> multiply(const Matrix& a, const Matrix& b, const std::optional<Tensor>& bias,
                                   Activation activation, bool with_preact, ScalarType out_type, at::IntArrayRef like) {
  RECORD_FUNCTION("amp_kernels::gemm", c10::ArrayRef<const c10::IValue>{});
  at::DimVector sizes(like.begin(), like.end());
  const auto empty = [&](int64_t columns) {
    sizes.back() = columns;
    return at::detail::empty_cpu(sizes, out_type, /*pin_memory=*/false, /*memory_format_opt=*/std::nullopt);
  };
  const Tensor bias_row = bias ? bias->contiguous() : Tensor();
  Tensor out = empty(is_gated(activation) ? b.columns / 2 : b.columns);
  Tensor preact = with_preact ? empty(b.columns) : Tensor();
  const bool done = gemm_call({.a = a.strided(),
                               .b = b.strided(),
                               .m = a.rows,
                               .n = b.columns,
                               .k = a.columns,
                               .operands = float_of(a.tensor.scalar_type()),
                               .bias = bias ? bias_row.const_data_ptr() : nullptr,
                               .bias_type = bias ? float_of(bias->scalar_type()) : Float::fp32,
                               .activation = activation,
                               .out = out.mutable_data_ptr(),
                               .preact = with_preact ? preact.mutable_data_ptr() : nullptr,
                               .out_type = float_of(out_type)});
  return done ? std::pair{out, preact} : std::pair<Tensor, Tensor>{};
}

Tensor multiply(const Matrix& a, const Matrix& b, ScalarType out_type, at::IntArrayRef like) {
  return multiply(a, b, std::nullopt, Activation::none, false, out_type, like).first;
}

}  // namespace
}  // namespace ak
