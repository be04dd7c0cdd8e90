// One call of an op on a GPU: where its tensors are, memory, launches. All glue is written over this object,
// which has two implementations: CUDA, and the emulator, whose ops are those of a second namespace and run on CPU
// tensors. So everything between the schema and the launcher runs, and is checked, without a GPU.
//
// A tensor is named where it is asked for its address: for an error of the argument, and for the emulator, where a
// kernel that touches memory without a name is stopped.
#pragma once

#ifdef AK_EMULATE
#include "base/gpu/target_emulator.h"
#else
#include "base/gpu/target_cuda.h"
#endif

#include <type_traits>
#include <utility>

#include "base/tensor_table.h"
#include "device/tensor_list.cuh"
#include "gradients/list.h"

namespace ak {

class GpuCall {
 public:
  // The device of `first` is that of the call.
  GpuCall(const char* op, ArgName name, const Tensor& first) : op_(op), target_(checked(op, name, first)) {}

  // ---- arguments

  void check_place(ArgName name, const Tensor& t) const {
    AK_CHECK(target_.holds(t), op_, ": ", name, " must be on ", target_.name(), " like the other arguments");
  }
  // The address of a tensor that kernels read.
  const void* read(ArgName name, const Tensor& t) {
    show(name, t, true, false);
    return t.const_data_ptr();
  }
  // The address of one that they write; `holds_values`: and read.
  void* write(ArgName name, const Tensor& t, bool holds_values = true) {
    show(name, t, holds_values, true);
    return t.mutable_data_ptr();
  }
  // Memory that is known by its address alone.
  void reach(ArgName name, const void* data, int64_t bytes, bool writable) {
    if (Target::kLooks) target_.show(name, data, static_cast<size_t>(bytes), true, writable);
  }
  const float* scalar(ArgName name, const Tensor& t) {
    check_one_element(op_, name, t, ScalarType::Float);
    return static_cast<const float*>(read(name, t));
  }
  const float* scalar(ArgName name, const std::optional<Tensor>& t) { return t ? scalar(name, *t) : nullptr; }
  template <typename T>
  T* mutable_scalar(ArgName name, const Tensor& t) {
    check_one_element(op_, name, t, kScalarType<T>);
    return static_cast<T*>(write(name, t));
  }
  template <typename T>
  T* mutable_scalar(ArgName name, const std::optional<Tensor>& t) {
    return t ? mutable_scalar<T>(name, *t) : nullptr;
  }

  // A list of dense tensors, for the kernels that look at each element once.
  template <typename Void>
  std::vector<GradRefTo<Void>> refs(const char* argument, const TensorList& list) {
    std::vector<GradRefTo<Void>> refs;
    refs.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      const ArgName name{argument, static_cast<int64_t>(i)};
      check_dtype(op_, name, list[i], {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double});
      check_dense(op_, name, list[i]);
      Void* data;
      if constexpr (std::is_const_v<Void>) {
        data = read(name, list[i]);
      } else {
        data = write(name, list[i]);
      }
      refs.push_back({data, list[i].numel(), dtype_of(list[i].scalar_type())});
    }
    return refs;
  }
  template <typename Void>
  std::vector<GradRefTo<Void>> grad_refs(const TensorList& grads) {
    return refs<Void>("grads", grads);
  }
  // The gradients of a table in place of a list.
  std::vector<GradRef> grad_refs(const Tensor& table) {
    const auto accepted = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double};
    const auto rows = table_rows(op_, {"table"}, table);
    std::vector<GradRef> refs;
    refs.reserve(rows.size());
    for (const TableRow& row : rows) {
      const ArgName name{"grads", static_cast<int64_t>(refs.size())};
      const ScalarType dtype = table_dtype(op_, name, row.grad_dtype, accepted);
      const GradRef ref{table_address(op_, name, row.grad, row.numel, dtype), row.numel, dtype_of(dtype)};
      reach(name, ref.data, ref.numel * bytes_of(ref.dtype), false);
      refs.push_back(ref);
    }
    return refs;
  }

  // ---- memory

  // An output.
  Tensor empty(ArgName name, torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) {
    const Tensor t = torch::stable::empty(size, dtype, std::nullopt, target_.device());
    if (Target::kLooks) target_.show_fresh(name, t.mutable_data_ptr(), bytes_of_span(t));
    return t;
  }
  // Memory of the call, the first `zeroed` bytes 0. Freed when the tensor goes: the allocator hands the memory to later
  // work of the same stream only.
  Tensor scratch(size_t bytes, size_t zeroed = 0) {
    const Tensor t = empty({"scratch"}, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    zero(t, zeroed);
    return t;
  }
  // Counters that are 0, for a kernel that leaves them 0: the stream's own, or memory of the call.
  uint32_t* counters(size_t count) {
    if (uint32_t* of_stream = target_.counters(count)) return of_stream;
    counters_ = scratch(count * 4, count * 4);
    return static_cast<uint32_t*>(counters_->mutable_data_ptr());
  }
  // Whether those took a memset: where a graph is captured, or for more counters than a stream has.
  bool counters_took_memset() const { return counters_.has_value(); }
  // Sets the first `bytes` of a tensor to 0, in the stream's order. Nothing for none: memset need not take the null of
  // an empty tensor.
  void zero(const Tensor& t, size_t bytes) {
    if (bytes > 0) target_.zero(t.mutable_data_ptr(), bytes);
  }

  // ---- the GPU

  GpuProperties properties() const { return target_.properties(); }

  // Calls launcher(args..., stream), which returns a Status, and raises if it failed.
  template <typename Launcher, typename... Args>
  void launch(const Launcher& launcher, Args&&... args) {
    const Status status = launcher(std::forward<Args>(args)..., target_.stream());
    AK_CHECK(status.ok(), op_, ": ", Target::failure(status));
  }

 private:
  static const Tensor& checked(const char* op, ArgName name, const Tensor& t) {
    AK_CHECK(Target::has(t), op, ": ", name, " must be on ", Target::kDevices, " like the other arguments");
    return t;
  }

  // From the first element to the last, whatever lies between them.
  static size_t bytes_of_span(const Tensor& t) {
    if (t.numel() == 0) return 0;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return static_cast<size_t>(last + 1) * t.element_size();
  }

  void show(ArgName name, const Tensor& t, bool holds_values, bool writable) {
    check_place(name, t);
    if (Target::kLooks) target_.show(name, t.const_data_ptr(), bytes_of_span(t), holds_values, writable);
  }

  const char* op_;
  Target target_;
  std::optional<Tensor> counters_;
};

}  // namespace ak
