// Arguments and launches of CUDA kernels: device checks, the current stream, scratch memory, errors of a launch.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <type_traits>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "kernels/grad_list.h"
#include "ops/check.h"
#include "ops/tensor_table.h"

namespace ak {

inline DType dtype_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      fail("no kernel works on dtype ", dtype_name(dtype));
  }
}

// The device of a call, made current while the object lives, and torch's current stream on it. Everything is enqueued
// there, nothing waits, and memory comes from torch's allocator, so a call can be captured in a CUDA graph.
class CudaCall {
 public:
  CudaCall(const char* op, ArgName name, const Tensor& first)
      : op_(op), index_(device_of(op, name, first)), guard_(index_) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream_));
  }

  void check_place(ArgName name, const Tensor& t) const {
    AK_CHECK(t.is_cuda() && t.get_device_index() == index_, op_, ": ", name, " must be on cuda:", index_,
             " like the other arguments");
  }
  const float* scalar(ArgName name, const Tensor& t) const {
    check_one_element(op_, name, t, ScalarType::Float);
    check_place(name, t);
    return static_cast<const float*>(t.const_data_ptr());
  }
  const float* scalar(ArgName name, const std::optional<Tensor>& t) const { return t ? scalar(name, *t) : nullptr; }
  // The same for one that the kernel writes.
  template <typename T>
  T* mutable_scalar(ArgName name, const Tensor& t) const {
    check_one_element(op_, name, t, kScalarType<T>);
    check_place(name, t);
    return static_cast<T*>(t.mutable_data_ptr());
  }
  // A list of dense gradients, for the kernels that look at each element once.
  template <typename Void>
  std::vector<GradRefTo<Void>> grad_refs(const TensorList& grads) const {
    std::vector<GradRefTo<Void>> refs;
    refs.reserve(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) {
      const ArgName name{"grads", static_cast<int64_t>(i)};
      check_dtype(op_, name, grads[i], {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double});
      check_place(name, grads[i]);
      check_dense(op_, name, grads[i]);
      Void* data;
      if constexpr (std::is_const_v<Void>) {
        data = grads[i].const_data_ptr();
      } else {
        data = grads[i].mutable_data_ptr();
      }
      refs.push_back({data, grads[i].numel(), dtype_of(grads[i].scalar_type())});
    }
    return refs;
  }

  // The gradients of a table in place of a list.
  std::vector<GradRef> grad_refs(const Tensor& table) const {
    const auto accepted = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double};
    const auto rows = table_rows(op_, {"table"}, table);
    std::vector<GradRef> refs;
    refs.reserve(rows.size());
    for (const TableRow& row : rows) {
      const ArgName name{"grads", static_cast<int64_t>(refs.size())};
      const ScalarType dtype = table_dtype(op_, name, row.grad_dtype, accepted);
      refs.push_back({table_address(op_, name, row.grad, row.numel, dtype), row.numel, dtype_of(dtype)});
    }
    return refs;
  }

  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const {
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA,
                                       static_cast<torch::stable::DeviceIndex>(index_));
    return torch::stable::empty(size, dtype, std::nullopt, device);
  }
  // Freed when the tensor goes: the allocator hands the memory to later work of the same stream only.
  Tensor scratch(size_t bytes) const { return empty({static_cast<int64_t>(bytes)}, ScalarType::Byte); }

  // Sets the first `bytes` of a tensor to zero, in the stream's order; nothing for none: cudaMemsetAsync need not take
  // the null of an empty tensor.
  void zero(const Tensor& t, size_t bytes) const {
    if (bytes > 0) STD_CUDA_CHECK(cudaMemsetAsync(t.mutable_data_ptr(), 0, bytes, static_cast<cudaStream_t>(stream_)));
  }

  Stream stream() const { return stream_; }
  void check(const Status& status) const {
    AK_CHECK(status.ok(), op_, ": a kernel could not be launched: CUDA error ", status.code, " (", status.message, ")");
  }

 private:
  static int32_t device_of(const char* op, ArgName name, const Tensor& t) {
    AK_CHECK(t.is_cuda(), op, ": ", name, " must be on a CUDA device like the other arguments");
    return t.get_device_index();
  }

  const char* op_;
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace ak
