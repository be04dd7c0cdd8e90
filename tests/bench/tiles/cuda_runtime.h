// A stand-in for the CUDA runtime, as far as bench/tiles.cpp calls it: memory is the host's, a launch takes the time
// that the test's gemm_sm90 says, and a graph repeats what was captured.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

using cudaStream_t = void*;
using cudaEvent_t = double*;
using cudaGraph_t = double*;
using cudaGraphExec_t = double*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum { cudaMemcpyDefault, cudaDevAttrMultiProcessorCount, cudaStreamCaptureModeThreadLocal };

namespace fake {
inline double now_ms = 0, captured_ms = 0;
inline bool capturing = false;
inline void pass(double ms) { (capturing ? captured_ms : now_ms) += ms; }
}  // namespace fake

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaMalloc(void** p, size_t n) {
  return (*p = std::malloc(n)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, int) {
  return std::memcpy(to, from, n), cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, size_t n) { return std::memset(p, value, n), cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  return *available = *total = size_t{64} << 20, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 132, cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* s) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = new double, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) { return *e = fake::now_ms, cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  return *ms = static_cast<float>(*b - *a), cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
  return fake::capturing = true, fake::captured_ms = 0, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* g) {
  return fake::capturing = false, *g = new double(fake::captured_ms), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, int) {
  return *e = new double(*g), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t) { return fake::pass(*e), cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return delete e, cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete g, cudaSuccess; }
