// The devices and their memory. Fresh memory is NaN in every floating-point type; if nothing is computed, zeros that
// take no memory before they are written.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake.h"

namespace fake {

Chip chips[kDevices];
thread_local int current_device = 0;
int captures = 0;

namespace {

constexpr size_t kAlignment = 512, kGap = 4096;
std::mutex mutex;
struct Buffer {
  size_t bytes;
  int device;
};
std::map<uintptr_t, Buffer> buffers;
uint64_t changes = 0;  // allocations and frees so far
bool dry = false;      // nothing is computed: tools/ptx/dry.py
size_t memory() { return size_t{dry ? 140u : 16u} << 30; }

cudaError_t allocate(void** p, size_t bytes) {
  const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment + kGap;
  *p = bytes ? std::aligned_alloc(kAlignment, whole) : nullptr;
  if (!*p) return bytes ? cudaErrorMemoryAllocation : cudaSuccess;
  std::memset(*p, dry ? 0 : 0xff, dry ? std::min(bytes, size_t{1} << 17) : bytes);
  const std::lock_guard lock(mutex);
  buffers[reinterpret_cast<uintptr_t>(*p)] = {bytes, current_device};
  changes++;
  return cudaSuccess;
}

cudaError_t release(void* p) {
  if (!p || captures > 0) return cudaSuccess;  // a graph that is being captured keeps what it uses
  const std::lock_guard lock(mutex);
  if (!buffers.erase(reinterpret_cast<uintptr_t>(p))) return fail(cudaErrorInvalidValue, "cudaFree of no allocation");
  changes++;
  std::free(p);
  return cudaSuccess;
}

}  // namespace
}  // namespace fake

using namespace fake;

/// Number of changes of the set of buffers; with `out`, writes pairs of address and bytes of the device's, at most
/// `pairs` of them, and returns how many there are.
FAKE_API uint64_t fake_memory_changes() { return changes; }
FAKE_API uint64_t fake_buffers(int device, uint64_t* out, uint64_t pairs) {
  const std::lock_guard lock(mutex);
  uint64_t i = 0;
  for (const auto& [at, buffer] : buffers) {
    if (buffer.device != device) continue;
    if (i < pairs) out[2 * i] = at, out[2 * i + 1] = buffer.bytes;
    i++;
  }
  return i;
}
FAKE_API void fake_compute_nothing() { dry = true; }
FAKE_API void fake_set_chip(int device, int major, int minor, int sm_count, int shared_per_block) {
  chips[device] = {major, minor, sm_count, shared_per_block, shared_per_block + 1024};
}

FAKE_API cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes); }
FAKE_API cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return allocate(p, bytes); }
FAKE_API cudaError_t cudaFree(void* p) { return release(p); }
FAKE_API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p); }
FAKE_API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
FAKE_API cudaError_t cudaFreeHost(void* p) {
  std::free(p);
  return cudaSuccess;
}
FAKE_API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
FAKE_API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
FAKE_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  const std::lock_guard lock(mutex);
  const auto at = reinterpret_cast<uintptr_t>(p);
  auto next = buffers.upper_bound(at);
  const bool device = next != buffers.begin() && at < std::prev(next)->first + std::prev(next)->second.bytes;
  *a = {};
  a->device = device ? std::prev(next)->second.device : -1;
  a->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
FAKE_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = memory();
  return cudaSuccess;
}

FAKE_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, false, [=] { return std::memcpy(to, from, bytes), cudaSuccess; });
}
FAKE_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = wait("cudaMemcpy")) return error;
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
FAKE_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  count("cudaMemsetAsync");
  return enqueue(stream, false, [=] { return std::memset(to, value, bytes), cudaSuccess; });
}
FAKE_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ---- the devices
FAKE_API cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
FAKE_API cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
FAKE_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  return current_device = device, cudaSuccess;
}
FAKE_API cudaError_t cudaDeviceSynchronize() { return wait("cudaDeviceSynchronize"); }
FAKE_API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
FAKE_API CUresult cuDriverGetVersion(int* version) { return *version = CUDART_VERSION, CUDA_SUCCESS; }
FAKE_API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
FAKE_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
FAKE_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, cudaSuccess;
}
FAKE_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const Chip& chip = chips[device];
  count("cudaDeviceGetAttribute");
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      return *value = chip.major, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      return *value = chip.minor, cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      return *value = chip.sm_count, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = chip.shared_per_block, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return *value = chip.shared_per_sm, cudaSuccess;
    default:
      return fail(cudaErrorNotSupported, "the fake device has no attribute " + std::to_string(which));
  }
}
FAKE_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  const Chip& chip = chips[device];
  *p = {};
  std::strcpy(p->name, "PTX on a CPU");
  p->totalGlobalMem = memory();
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerBlockOptin = static_cast<size_t>(chip.shared_per_block);
  p->sharedMemPerMultiprocessor = static_cast<size_t>(chip.shared_per_sm);
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->major = chip.major;
  p->minor = chip.minor;
  p->multiProcessorCount = chip.sm_count;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  return cudaSuccess;
}

// ---- of the driver, which torch opens as libcuda.so.1
FAKE_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
