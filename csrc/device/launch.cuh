#pragma once
// launch(): starts a kernel, in place of <<<>>>.
//   Status s = launch(scale_kernel<4>, {.name = "scale", .grid = blocks, .block = 256, .stream = stream}, out, table);
#include <cstddef>

#include "device/platform.cuh"
#include "device/status.h"

namespace ak {

struct LaunchConfig {
  const char* name;               ///< for error messages
  int grid;                       ///< blocks
  int block;                      ///< threads per block, a multiple of 32
  std::size_t shared_bytes = 0;   ///< dynamic shared memory; above 48 KB the kernel must have no shared<T, N>()
  int cluster = 1;                ///< blocks per cluster; above 1 only if device_runs_sm90_code()
  bool overlap_previous = false;  ///< may start before the previous kernel ends, and must call
                                  ///< wait_for_previous_kernel(); ignored unless device_runs_sm90_code(), directly
                                  ///< after a memset of this thread (follows_memset()), and with AMP_KERNELS_PDL=0
  Stream stream = nullptr;
};

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/launch.h"
#else
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "device/device_facts.h"

namespace ak {

inline Status status_of(cudaError_t error) { return {static_cast<int>(error), error ? cudaGetErrorString(error) : ""}; }

namespace detail {

/// Architectures that this file is compiled for, as in __CUDA_ARCH__.
#ifdef __CUDA_ARCH_LIST__
constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
#else
constexpr int kArchs[] = {0};
#endif

/// A cache of this thread, emptied with what is known of the devices.
template <class Cache>
Cache& thread_cache() {
  thread_local int generation = 0;
  thread_local Cache cache;
  if (generation != known_devices().generation) {
    cache.clear();
    generation = known_devices().generation;
  }
  return cache;
}

/// Raises `kernel`'s limit of dynamic shared memory to the maximum, once per device. Not to what a launch needs, since
/// another thread launching with less could lower the limit in between.
inline cudaError_t allow_shared_memory(const void* kernel) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  auto& allowed = thread_cache<std::set<std::pair<const void*, int> > >();
  if (allowed.contains({kernel, device})) return cudaSuccess;
  const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  const cudaError_t error = cudaFuncSetAttribute(kernel, limit, device_shared_limit());
  if (error == cudaSuccess) allowed.emplace(kernel, device);
  return error;
}

}  // namespace detail

/// True if kernels of this file run on the current device as code that has the instructions of sm_90: clusters and
/// programmatic dependent launch. A chip without code of its own major version runs PTX of sm_80.
static inline bool device_runs_sm90_code() {
  const int capability = current_device_facts().capability;
  for (const int arch : detail::kArchs) {
    if (arch >= 900 && arch / 100 == capability / 10 && arch <= capability * 10) return true;
  }
  return false;
}

namespace detail {

/// False with AMP_KERNELS_PDL=0 in the environment of the process.
inline bool kernels_may_overlap() {
  static const bool may = [] {
    const char* value = std::getenv("AMP_KERNELS_PDL");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return may;
}

/// A launch as the runtime describes it. Not copied, since `runtime` points to `attributes`.
struct RuntimeConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t runtime = {};

  RuntimeConfig(const LaunchConfig& config, bool overlaps) {
    unsigned count = 0;
    if (config.cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count++].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
    }
    if (overlaps) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    runtime.gridDim = static_cast<unsigned>(config.grid);
    runtime.blockDim = static_cast<unsigned>(config.block);
    runtime.dynamicSmemBytes = config.shared_bytes;
    runtime.stream = static_cast<cudaStream_t>(config.stream);
    runtime.attrs = attributes;
    runtime.numAttrs = count;
  }
  RuntimeConfig(const RuntimeConfig&) = delete;
};

}  // namespace detail

/// Clusters of this shape that the current device holds at once; 0 if none. A cluster lies within a GPC, so 132 SMs may
/// hold fewer than 16 clusters of 8 blocks. The runtime is asked once per kernel, device and size of shared memory.
template <class... Params>
int resident_clusters(void (*kernel)(Params...), const LaunchConfig& config) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  int device = 0, clusters = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  auto& known = detail::thread_cache<std::map<std::tuple<const void*, int, std::size_t>, int> >();
  const auto [it, is_new] = known.try_emplace({function, device, config.shared_bytes}, 0);
  if (!is_new) return it->second;
  const detail::RuntimeConfig asked(config, false);
  cudaError_t error = detail::allow_shared_memory(function);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, function, &asked.runtime);
  if (error != cudaSuccess) cudaGetLastError();  // forgotten: the caller has another kernel
  return it->second = error == cudaSuccess ? clusters : 0;
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  constexpr std::size_t kAlwaysAllowed = 48 * 1024;
  if (config.shared_bytes > kAlwaysAllowed) {
    const cudaError_t error = detail::allow_shared_memory(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return status_of(error);
  }
  const bool after_memset = std::exchange(follows_memset(), false);
  const bool overlaps =
      config.overlap_previous && !after_memset && detail::kernels_may_overlap() && device_runs_sm90_code();
  const detail::RuntimeConfig described(config, overlaps);
  return status_of(cudaLaunchKernelEx(&described.runtime, kernel, std::forward<Args>(args)...));
}

}  // namespace ak
#endif

namespace ak {

/// Dynamic shared memory per block, in bytes, if `blocks` share an SM; 1,024 bytes of each are reserved.
inline int shared_share(int blocks) {
  constexpr int kReserved = 1024;
  return (device_shared_limit() + kReserved) / blocks - kReserved;
}

}  // namespace ak
