// One call of an op on a GPU: device checks, memory, launches. All glue uses this class, which has two targets: CUDA,
// and the emulator, whose ops have a namespace of their own and take CPU tensors. So the glue runs and is checked
// without a GPU.
//
// Addresses are requested together with the argument's name, for error messages and for the emulator, which stops a
// kernel that accesses any other memory.
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
  // The call runs on the device of `first`.
  GpuCall(const char* op, ArgName name, const Tensor& first) : op_(op), target_(checked(op, name, first)) {}

  // ---- arguments

  void check_place(ArgName name, const Tensor& t) const {
    AK_CHECK(target_.holds(t), op_, ": ", name, " must be on ", target_.name(), " like the other arguments");
  }
  // Address of a tensor that kernels read.
  const void* read(ArgName name, const Tensor& t) {
    show(name, t, true, false);
    return t.const_data_ptr();
  }
  // Address of a tensor that kernels write and, if `holds_values`, read.
  void* write(ArgName name, const Tensor& t, bool holds_values = true) {
    show(name, t, holds_values, true);
    return t.mutable_data_ptr();
  }
  // Declares memory known only by its address.
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

  // A list of dense tensors, for kernels that process them in memory order.
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
  // The gradients of an address table.
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

  // Allocates an output.
  Tensor empty(ArgName name, torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) {
    const Tensor t = torch::stable::empty(size, dtype, std::nullopt, target_.device());
    if (Target::kLooks) target_.show_fresh(name, t.mutable_data_ptr(), bytes_of_span(t));
    return t;
  }
  // Scratch memory whose first `zeroed` bytes are 0. It is safe to free before the kernels run, since the allocator
  // reuses it only for later work on the same stream.
  Tensor scratch(size_t bytes, size_t zeroed = 0) {
    const Tensor t = empty({"scratch"}, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    zero(t, zeroed);
    return t;
  }
  // Zeroed counters for a kernel that leaves them 0: the stream's, or scratch of the call.
  uint32_t* counters(size_t count) {
    if (uint32_t* of_stream = target_.counters(count)) return of_stream;
    counters_ = scratch(count * 4, count * 4);
    return static_cast<uint32_t*>(counters_->mutable_data_ptr());
  }
  // True if the counters needed a memset: during graph capture, or for more counters than a stream has.
  bool counters_took_memset() const { return counters_.has_value(); }
  // Enqueues a memset of the first `bytes` of a tensor. Skipped for 0 bytes: an empty tensor's null pointer is not
  // valid.
  void zero(const Tensor& t, size_t bytes) {
    if (bytes > 0) target_.zero(t.mutable_data_ptr(), bytes);
  }

  // ---- the GPU

  GpuProperties properties() const { return target_.properties(); }

  // Calls launcher(args..., stream), which returns a Status, and raises if it failed.
  template <typename Launcher, typename... Args>
  void launch(const Launcher& launcher, Args&&... args) {
    check(try_launch(launcher, std::forward<Args>(args)...));
  }
  // The same, for a caller who looks at the Status before check().
  template <typename Launcher, typename... Args>
  Status try_launch(const Launcher& launcher, Args&&... args) {
    return launcher(std::forward<Args>(args)..., target_.stream());
  }
  void check(const Status& status) const { AK_CHECK(status.ok(), op_, ": ", Target::failure(status)); }

 private:
  static const Tensor& checked(const char* op, ArgName name, const Tensor& t) {
    AK_CHECK(Target::has(t), op, ": ", name, " must be on ", Target::kDevices, " like the other arguments");
    return t;
  }

  // Bytes from the first element to the last, gaps included.
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
