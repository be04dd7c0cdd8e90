// Tensors as gemm/call.h takes them, for the glue of its ops.
#pragma once

#include <algorithm>
#include <optional>

#include "base/op_call.h"
#include "gemm/call.h"
#include "gemm/operand.h"

namespace ak {

inline int as_int(const char* op, int64_t size) {
  AK_CHECK(size <= kMostGemmSize, op, ": a size is ", size, "; accepted: at most ", kMostGemmSize);
  return static_cast<int>(size);
}

// 0 if a batch has one matrix.
inline int64_t batch_stride_of(const Tensor& t) { return t.dim() == 3 && t.size(0) > 1 ? t.stride(0) : 0; }

inline GemmValues values_of(const Tensor& t, void* data) {
  const int64_t d = t.dim();
  return {data, dtype_of(t.scalar_type()), t.stride(d - 2), t.stride(d - 1), batch_stride_of(t)};
}

// An operand that is contiguous along one of its dimensions.
struct TensorOperand {
  Tensor tensor;  // keeps a copy alive
  GemmOperand layout;

  // `k_dim` is the dimension, of the last two, that is summed over.
  TensorOperand(const Tensor& t, int64_t k_dim) : tensor(t) {
    auto as_given = found_layout(k_dim);
    if (!as_given) {
      tensor = torch::stable::contiguous(t);
      as_given = found_layout(k_dim);
    }
    layout = *as_given;
  }

  // Lines across k, also of a batch: those of gemm_sm90_chained.
  void lay_across(int64_t k_dim) {
    if (!layout.k_contiguous) return;
    const int64_t d = tensor.dim(), other = k_dim == d - 1 ? d - 2 : d - 1;
    if (tensor.size(other) > 1) {
      const auto turned = [&](const Tensor& t) { return k_dim == d - 1 ? torch::stable::transpose(t, -2, -1) : t; };
      tensor = turned(torch::stable::contiguous(turned(tensor)));
    }
    layout = {tensor.size(k_dim) == 1 ? (tensor.size(other) + 7) / 8 * 8 : tensor.stride(k_dim), false};
  }

  // Copies a matrix whose lines are not along k, or not across it, as asked for.
  void lay(int64_t k_dim, bool along_k) {
    if (layout.k_contiguous == along_k) return;
    const int64_t inner = along_k ? k_dim : 1 - k_dim;
    tensor = torch::stable::contiguous(inner == 1 ? tensor : torch::stable::transpose(tensor, 0, 1));
    layout = {std::max<int64_t>(tensor.size(1), 1), along_k};
  }

 private:
  std::optional<GemmOperand> found_layout(int64_t k_dim) const {
    const int64_t d = tensor.dim(), other = k_dim == d - 1 ? d - 2 : d - 1;
    return gemm_operand(tensor.size(k_dim), tensor.stride(k_dim), tensor.size(other), tensor.stride(other));
  }
};

}  // namespace ak
