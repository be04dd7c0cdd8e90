// One call of an op: where its tensors must be, its memory, and the launch of its kernel. Glue between schema and
// kernel is written once over this object, for three targets: the CPU library, CUDA, and the emulator, whose ops are in
// a second namespace and take CPU tensors. So the emulator checks the glue of the CUDA library without a GPU.
//
// Addresses are requested together with the argument's name, for error messages and for the emulator, which stops a
// kernel that accesses any other memory.
#pragma once

#if defined(AK_EMULATE)
#include "base/gpu/target_emulator.h"
#elif defined(AK_ON_CPU)
#include "base/cpu/target.h"
#else
#include "base/gpu/target_cuda.h"
#endif

#include <utility>

#include "base/check.h"
#include "device/status.h"

namespace ak {

class OpCall {
 public:
  // CPU kernels need no scratch, and glue may read the values of their tensors.
  static constexpr bool kOnCpu = Target::kOnCpu;

  // The call runs on the device of `first`.
  OpCall(const char* op, ArgName name, const Tensor& first) : op_(op), target_(checked(op, name, first)) {}

  const char* op() const { return op_; }
  const Target& target() const { return target_; }

  // ---- arguments

  void check_place(ArgName name, const Tensor& t) const {
    AK_CHECK(target_.holds(t), op_, ": ", name, " must be on ", target_.name(), " like the other arguments");
  }
  // Address of a tensor that kernels read.
  const void* read(ArgName name, const Tensor& t) {
    show(name, t, true, false);
    return t.const_data_ptr();
  }
  const void* read(ArgName name, const std::optional<Tensor>& t) { return t ? read(name, *t) : nullptr; }
  template <typename T, typename MaybeTensor>
  const T* read(ArgName name, const MaybeTensor& t) {
    return static_cast<const T*>(read(name, t));
  }
  // Address of a tensor that kernels write and, if `holds_values`, read.
  void* write(ArgName name, const Tensor& t, bool holds_values = true) {
    show(name, t, holds_values, true);
    return t.mutable_data_ptr();
  }
  // Declares memory known only by its address.
  void reach(ArgName name, const void* data, int64_t bytes, bool writable) {
    if (Target::kLooks) target_.show(name, data, static_cast<size_t>(bytes), true, writable, 2);
  }
  const float* scalar(ArgName name, const Tensor& t) {
    check_one_element(op_, name, t, ScalarType::Float);
    return read<float>(name, t);
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

  // ---- memory

  // Allocates an output.
  Tensor empty(ArgName name, torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) {
    const Tensor t = target_.empty(size, dtype);
    if (Target::kLooks) target_.show_fresh(name, t.mutable_data_ptr(), bytes_of_span(t));
    return t;
  }
  // Scratch memory whose first `zeroed` bytes are 0; null for no bytes. It is freed with this object, maybe before
  // the kernels run, which is safe: the allocator reuses it only for later work on the same stream.
  void* scratch(size_t bytes, size_t zeroed = 0) {
    if (bytes == 0) return nullptr;
    const Tensor& t = scratch_.emplace_back(empty({"scratch"}, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
    zero(t, zeroed);
    return t.mutable_data_ptr();
  }
  // Zeroed counters for a kernel that leaves them 0: the stream's, or scratch of the call.
  uint32_t* counters(size_t count) {
    if (kOnCpu) return nullptr;
    if (uint32_t* of_stream = target_.counters(count)) return of_stream;
    return static_cast<uint32_t*>(scratch(count * 4, count * 4));
  }
  // Enqueues a memset of the first `bytes` of a tensor. Skipped for 0 bytes: an empty tensor's null pointer is not
  // valid.
  void zero(const Tensor& t, size_t bytes) {
    if (bytes > 0) target_.zero(t.mutable_data_ptr(), bytes);
  }

  // ---- the kernel

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

  // From the first element to the last, gaps included.
  static size_t bytes_of_span(const Tensor& t) {
    if (t.numel() == 0) return 0;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return static_cast<size_t>(last + 1) * t.element_size();
  }

  void show(ArgName name, const Tensor& t, bool holds_values, bool writable) {
    check_place(name, t);
    if (Target::kLooks)
      target_.show(name, t.const_data_ptr(), bytes_of_span(t), holds_values, writable, t.element_size());
  }

  const char* op_;
  Target target_;
  std::vector<Tensor> scratch_;
};

}  // namespace ak
