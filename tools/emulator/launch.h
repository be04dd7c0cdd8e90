#pragma once
// launch() on the emulator: runs the kernel to its end, under the schedule selected by emu::options().seed.
#include <tuple>
#include <utility>

#include "device/status.h"
#include "emulator/machine.h"

namespace ak {
namespace emu {

/// Makes the driver's checks, runs the kernel, and keeps an error message until the next launch. `arguments`: bytes.
Status run_kernel(const LaunchConfig& config, size_t arguments, const std::function<void()>& body);

/// One line per launch since the log was cleared:
/// "name grid 4 block 256 cluster 1 shared 0 arguments 24 overlaps 1 half_sectors 0".
std::string& launch_log();

}  // namespace emu

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  std::tuple<std::decay_t<Params>...> copies(std::forward<Args>(args)...);
  size_t arguments = 0;
  ((arguments = (arguments + alignof(Params) - 1) / alignof(Params) * alignof(Params) + sizeof(Params)), ...);
  return emu::run_kernel(config, arguments, [&] { std::apply(kernel, copies); });
}

template <class... Params>
int resident_clusters(void (*)(Params...), const LaunchConfig& config) {
  return emu::options().sm_count / config.cluster;
}
inline bool device_runs_sm90_code() { return emu::options().runs_sm90_code; }
inline int device_sm_count() { return emu::options().sm_count; }
inline int device_shared_limit() { return emu::options().shared_limit; }

}  // namespace ak
