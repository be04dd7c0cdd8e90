#pragma once
// launch(): the one way to start a kernel, in place of <<<>>>.
//   Status s = launch(scale_kernel<4>, {.name = "scale", .grid = blocks, .block = 256, .stream = stream}, out, table);
#include <cstddef>

#include "device/platform.cuh"
#include "device/status.h"

namespace ak {

struct LaunchConfig {
  const char* name;              ///< what errors call the kernel
  int grid;                      ///< blocks
  int block;                     ///< threads per block, a multiple of 32
  std::size_t shared_bytes = 0;  ///< dynamic shared memory; above 48 KB the kernel must have no shared<T, N>()
  int cluster = 1;               ///< blocks per cluster (sm_90 and later when above 1)
  bool overlap_previous =
      false;  ///< may start before the kernel in front of it ends; then it must call wait_for_previous_kernel()
  Stream stream = nullptr;
};

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/launch.h"
#else
#include <utility>

namespace ak {

inline Status status_of(cudaError_t error) { return {static_cast<int>(error), error ? cudaGetErrorString(error) : ""}; }

/// SMs of the current device; launchers of persistent kernels size their grid by it.
inline int device_sm_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}
/// Bytes of dynamic shared memory that one block may have on the current device.
inline int device_shared_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 48 * 1024;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 48 * 1024;
  return bytes;
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), const LaunchConfig& config, Args&&... args) {
  constexpr std::size_t kAlwaysAllowed = 48 * 1024;
  if (config.shared_bytes > kAlwaysAllowed) {
    // Not config.shared_bytes: another thread may start the same kernel with less, and lower the limit in between.
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, limit, device_shared_limit());
    if (error != cudaSuccess) return status_of(error);
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (config.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
  }
  if (config.overlap_previous) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = static_cast<unsigned>(config.grid);
  launch_config.blockDim = static_cast<unsigned>(config.block);
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = static_cast<cudaStream_t>(config.stream);
  launch_config.attrs = attributes;
  launch_config.numAttrs = count;
  return status_of(cudaLaunchKernelEx(&launch_config, kernel, std::forward<Args>(args)...));
}

}  // namespace ak
#endif
