#include "device/launch.cuh"

#include "emulator/memory.h"
#include "emulator/tma.h"

namespace ak::emu {
namespace {

constexpr int kInvalidValue = 1;     // cudaErrorInvalidValue
constexpr int kLaunchFailure = 719;  // cudaErrorLaunchFailure

std::string refused(const LaunchConfig& c) {
  if (c.grid < 1) return format("grid = %d, at least 1 is needed", c.grid);
  if (c.block < 1 || c.block > 1024 || c.block % 32 != 0) {
    return format("block = %d, a multiple of 32 up to 1024 is accepted", c.block);
  }
  if (c.cluster < 1 || c.cluster > 8 || c.grid % c.cluster != 0) {
    return format("cluster = %d does not divide grid = %d, or is not in [1, 8]", c.cluster, c.grid);
  }
  if (c.shared_bytes > kSharedLimit) {
    return format("shared_bytes = %zu, at most %u is accepted", c.shared_bytes, kSharedLimit);
  }
  return "";
}

}  // namespace

std::string& launch_log() {
  static std::string log;
  return log;
}

Status run_kernel(const LaunchConfig& config, size_t arguments, const std::function<void()>& body) {
  static std::string message;
  message = refused(config);
  if (!message.empty()) {
    message = format("launch of %s: ", config.name) + message;
    return {kInvalidValue, message.c_str()};
  }
  global_memory().start_launch();
  forget_prefetched();
  Machine m({config.name, config.grid, config.block, config.cluster, config.shared_bytes, config.overlap_previous});
  message = m.run(body);
  launch_log() += format("%s grid %d block %d cluster %d shared %zu arguments %zu overlaps %d half_sectors %d\n",
                         config.name, config.grid, config.block, config.cluster, config.shared_bytes, arguments,
                         config.overlap_previous, m.sectors.halves());
  return {message.empty() ? 0 : kLaunchFailure, message.c_str()};
}

}  // namespace ak::emu

/// launch_log() for processes that load a library with the emulator.
extern "C" __attribute__((visibility("default"))) const char* ak_emulator_launches() {
  return ak::emu::launch_log().c_str();
}
