// CUDA target of base/op_call.h: torch's current stream and allocator, and the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/gpu/properties.h"
#include "device/device_facts.h"
#include "device/status.h"

#define AK_OPS(m) STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m)

namespace ak {

// Makes a tensor's device current while the object lives, and enqueues on torch's current stream. Nothing synchronizes
// and memory comes from torch's allocator, so a call can be captured in a CUDA graph.
class Target {
 public:
  static constexpr bool kOnCpu = false;
  static constexpr const char* kDevices = "a CUDA device";
  static constexpr bool kLooks = false;  // kernels can access all device memory, so nothing is declared
  static bool has(const Tensor& t) { return t.is_cuda(); }

  explicit Target(const Tensor& first) : index_(first.get_device_index()), guard_(index_) {
    make_current(index_);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream_));
  }

  bool holds(const Tensor& t) const { return t.is_cuda() && t.get_device_index() == index_; }
  std::string name() const { return "cuda:" + std::to_string(index_); }
  Stream stream() const { return stream_; }

  Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef size, ScalarType dtype) const {
    const auto index = static_cast<torch::stable::DeviceIndex>(index_);
    return torch::stable::empty(size, dtype, std::nullopt,
                                torch::stable::Device{torch::headeronly::DeviceType::CUDA, index});
  }

  GpuProperties properties() const {
    DeviceFacts facts{};
    STD_CUDA_CHECK(device_facts(index_, &facts));
    return {facts.sm_count, facts.capability, facts.geforce};
  }

  void zero(void* data, size_t bytes) const {
    STD_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream_)));
    follows_memset() = true;
  }

  // Counters of the stream, all 0 between its kernels. Null during capture, since a graph may run concurrently with
  // later work of the stream and so needs memory of its own. Null also if out of memory, and beyond 256 streams. The
  // key is the stream's id: CUDA may give the handle of a destroyed stream, whose kernels still run, to a new one, and
  // the default streams of all threads share one handle.
  uint32_t* counters(size_t count) const {
    constexpr size_t kMost = 4096, kMostStreams = 256;
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_), &captured));
    if (count > kMost || captured != cudaStreamCaptureStatusNone) return nullptr;
    unsigned long long id = 0;
    STD_CUDA_CHECK(cudaStreamGetId(static_cast<cudaStream_t>(stream_), &id));
    static std::mutex mutex;
    static auto& of_streams =
        *new std::map<std::pair<int32_t, uint64_t>, uint32_t*>;  // leaked: no order of destruction at exit
    const std::lock_guard lock(mutex);
    const std::pair<int32_t, uint64_t> key{index_, id};
    if (of_streams.size() >= kMostStreams && !of_streams.contains(key)) return nullptr;
    uint32_t*& own = of_streams[key];
    if (!own) {
      own = static_cast<uint32_t*>(outside_of_pools(kMost * 4));
      if (own) zero(own, kMost * 4);
    }
    return own;
  }

  void show(ArgName, const void*, size_t, bool, bool, size_t) const {}
  void show_fresh(ArgName, void*, size_t) const {}

  static std::string failure(const Status& status) {
    return "a kernel could not be launched: CUDA error " + std::to_string(status.code) + " (" + status.message + ")";
  }

 private:
  // The guard has set the device of torch's CUDA runtime. Ours is a separate, statically linked one; that it would
  // follow the driver's context is an implementation detail.
  static void make_current(int32_t index) {
    int current = -1;
    STD_CUDA_CHECK(cudaGetDevice(&current));
    if (current != index) STD_CUDA_CHECK(cudaSetDevice(index));
  }

  // Memory that is never freed, or null. Not from torch's allocator: during warm-up for a capture it allocates from the
  // graph's pool, which reuses the memory in replays.
  static void* outside_of_pools(size_t bytes) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another thread may be capturing
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    if (error == cudaSuccess) return memory;
    (void)cudaGetLastError();  // torch holds all memory: allocate per call instead
    return nullptr;
  }

  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace ak
