// The CPU library behind base/op_call.h.
#pragma once

#include <cstring>

#include "base/check.h"
#include "base/cpu/empty.h"
#include "device/status.h"

#define AK_OPS(m) STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m)

namespace ak {

class Target {
 public:
  static constexpr bool kOnCpu = true;
  static constexpr const char* kDevices = "the CPU";
  static constexpr bool kLooks = false;
  static bool has(const Tensor& t) { return t.is_cpu(); }

  explicit Target(const Tensor&) {}

  bool holds(const Tensor& t) const { return t.is_cpu(); }
  const char* name() const { return kDevices; }
  Stream stream() const { return nullptr; }

  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const {
    return empty_tensor(size, dtype);
  }
  void zero(void* data, size_t bytes) const { std::memset(data, 0, bytes); }
  uint32_t* counters(size_t) const { return nullptr; }

  void show(ArgName, const void*, size_t, bool, bool, size_t) const {}
  void show_fresh(ArgName, void*, size_t) const {}

  static const char* failure(const Status& status) { return status.message; }
};

}  // namespace ak
