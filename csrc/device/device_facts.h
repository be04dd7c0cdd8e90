// Cached properties of CUDA devices.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "device/chip_name.h"

namespace ak {

/// Properties used by launchers and planners.
struct DeviceFacts {
  int sm_count, capability, shared_limit;  ///< capability: 10 major + minor
  bool geforce;
};

/// True if this thread enqueued a memset after its last kernel. In a graph a programmatic dependency can begin at a
/// kernel only, so the kernel after a memset is launched without one.
inline bool& follows_memset() {
  thread_local bool follows = false;
  return follows;
}

namespace detail {

/// Process-wide cache, by device.
struct KnownDevices {
  static constexpr int kMost = 64;
  std::atomic<uint64_t> facts[kMost] = {};  ///< geforce, shared_limit, capability, sm_count; 0: unknown
  std::atomic<int> generation = 0;          ///< number of calls of forget()

  void forget() {
    for (auto& fact : facts) fact = 0;
    generation++;
  }
};
inline KnownDevices& known_devices() {
  static KnownDevices devices;
  return devices;
}

}  // namespace detail

inline cudaError_t device_facts(int device, DeviceFacts* facts) {
  if (device < 0 || device >= detail::KnownDevices::kMost) return cudaErrorInvalidDevice;
  std::atomic<uint64_t>& known = detail::known_devices().facts[device];
  uint64_t packed = known;
  if (packed == 0) {
    constexpr cudaDeviceAttr kAsked[] = {cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor,
                                         cudaDevAttrComputeCapabilityMinor, cudaDevAttrMaxSharedMemoryPerBlockOptin};
    int answers[4] = {};
    for (int i = 0; i < 4; i++) {
      const cudaError_t error = cudaDeviceGetAttribute(&answers[i], kAsked[i], device);
      if (error != cudaSuccess) return error;
    }
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess) return error;
    const uint64_t geforce = is_geforce(properties.name);
    packed = geforce << 63 | static_cast<uint64_t>(answers[3]) << 32 |
             static_cast<uint64_t>(10 * answers[1] + answers[2]) << 16 | static_cast<uint64_t>(answers[0]);
    known = packed;
  }
  *facts = {static_cast<int>(packed & 0xffff), static_cast<int>(packed >> 16 & 0xffff),
            static_cast<int>(packed >> 32 & 0x7fffffff), (packed >> 63) != 0};
  return cudaSuccess;
}

/// Properties of the current device, or a lower bound if the query fails.
inline DeviceFacts current_device_facts() {
  int device = 0;
  DeviceFacts facts{1, 0, 48 * 1024, false};
  if (cudaGetDevice(&device) == cudaSuccess) device_facts(device, &facts);
  return facts;
}
/// SMs of the current device, for the size of persistent grids.
inline int device_sm_count() { return current_device_facts().sm_count; }
/// Maximum dynamic shared memory per block of the current device, in bytes.
inline int device_shared_limit() { return current_device_facts().shared_limit; }

}  // namespace ak
