// Emulator target of base/op_call.h: CPU tensors; kernels may access only memory that the glue has declared.
//
// AMP_KERNELS_EMULATE_SEED selects the schedule of threads and copies (default 0), AMP_KERNELS_EMULATE_CAPABILITY and
// AMP_KERNELS_EMULATE_SMS the GPU to plan launches for (default 9.0, 132). With AMP_KERNELS_EMULATE_SECTORS set, the
// launch log counts stores of half sectors. They are read at each call.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/gpu/properties.h"
#include "device/launch.cuh"
#include "device/status.h"
#include "emulator/machine.h"
#include "emulator/visible.h"

#define AK_OPS(m) STABLE_TORCH_LIBRARY_IMPL(amp_kernels_emulated, CPU, m)

namespace ak {

class Target {
 public:
  static constexpr bool kOnCpu = false;
  static constexpr const char* kDevices = "the CPU, where the emulator runs,";
  static constexpr bool kLooks = true;  // kernels may access declared memory only
  static bool has(const Tensor& t) { return t.is_cpu(); }

  explicit Target(const Tensor&) : one_at_a_time_(machine()) {
    emu::options() = {};
    emu::launch_log().clear();
    if (const char* seed = std::getenv("AMP_KERNELS_EMULATE_SEED"))
      emu::options().seed = std::strtoull(seed, nullptr, 10);
    emu::options().count_sectors = std::getenv("AMP_KERNELS_EMULATE_SECTORS") != nullptr;
    emu::options().runs_sm90_code = properties().capability >= 90;
  }

  bool holds(const Tensor& t) const { return t.is_cpu(); }
  std::string name() const { return "the CPU"; }
  Stream stream() const { return nullptr; }

  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const {
    return torch::stable::empty(size, dtype, std::nullopt, torch::stable::Device{torch::headeronly::DeviceType::CPU});
  }

  // Launches are planned for an H200 by default. The emulator's own number of SMs only sizes persistent grids.
  GpuProperties properties() const {
    GpuProperties gpu{132, 90};
    char* end = nullptr;
    if (const char* sms = std::getenv("AMP_KERNELS_EMULATE_SMS")) {
      const long count = std::strtol(sms, &end, 10);
      AK_CHECK(count > 0 && count <= INT_MAX && *end == 0, "AMP_KERNELS_EMULATE_SMS is '", sms,
               "'; accepted: a number of multiprocessors, at least 1");
      gpu.sm_count = static_cast<int>(count);
    }
    if (const char* capability = std::getenv("AMP_KERNELS_EMULATE_CAPABILITY")) {
      const long major = std::strtol(capability, &end, 10);
      const long minor = *end == '.' ? std::strtol(end + 1, &end, 10) : -1;
      AK_CHECK(major > 0 && minor >= 0 && *end == 0, "AMP_KERNELS_EMULATE_CAPABILITY is '", capability,
               "'; accepted: a compute capability such as 9.0");
      gpu.capability = static_cast<int>(10 * major + minor);
    }
    return gpu;
  }

  void zero(void* data, size_t bytes) {
    std::memset(data, 0, bytes);
    memory_.set_initialised(data, bytes);
  }

  // As on a GPU. The next request checks that kernels left them 0.
  uint32_t* counters(size_t count) {
    static std::vector<uint32_t> all(4096);
    if (count > all.size()) return nullptr;
    const bool zero = std::all_of(all.begin(), all.end(), [](uint32_t x) { return x == 0; });
    std::fill(all.begin(), all.end(), 0u);
    AK_CHECK(zero, "an earlier kernel has left counters that are not 0");
    memory_.add("counters", all.data(), count * 4, true, true);
    return all.data();
  }

  void show(ArgName name, const void* data, size_t bytes, bool holds_values, bool writable, size_t element_size) {
    std::ostringstream text;
    text << name;
    memory_.add(text.str(), data, bytes, holds_values, writable, element_size == 1 ? 1 : emu::kGranule);
  }
  // Declares uninitialized memory: filled with NaN, and an error to read before a kernel has written it.
  void show_fresh(ArgName name, void* data, size_t bytes) {
    if (bytes > 0) std::memset(data, 0xff, bytes);
    show(name, data, bytes, false, true, 2);
  }

  static std::string failure(const Status& status) { return status.message; }

 private:
  static std::mutex& machine() {
    static std::mutex mutex;
    return mutex;
  }

  std::lock_guard<std::mutex> one_at_a_time_;
  emu::VisibleMemory memory_;
};

}  // namespace ak
