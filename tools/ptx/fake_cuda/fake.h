// A CUDA runtime without a GPU, preloaded in place of libcudart: device memory is host memory, work is done in the
// order in which it is enqueued, and a kernel is handed to the PTX interpreter, which registers itself as
// `Interpreter`. There are two devices, neither of which reaches the other's memory.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fake {

/// A launch, as the runtime was asked for it. Mirrored in host.py.
struct Launch {
  const char* kernel;
  unsigned grid[3], block[3], cluster[3];
  uint64_t shared_bytes;
  int overlap;       ///< programmatic stream serialization, and a kernel is right in front of it in its stream
  int shared_limit;  ///< of dynamic shared memory, as set by cudaFuncSetAttribute
  int device;
  void** arguments;
};

/// `prepare` copies the arguments and returns a number for the launch, or -1; `run` does it, any number of times.
struct Interpreter {
  int (*prepare)(const Launch*);
  int (*run)(int launch, int overlap);
};
extern Interpreter interpreter;

/// Properties of the named chip.
struct Chip {
  int major = 9, minor = 0, sm_count = 2;
  int shared_per_block = 227 * 1024, shared_per_sm = 228 * 1024;
};
constexpr int kDevices = 2;
extern Chip chips[kDevices];
extern thread_local int current_device;
extern int captures;  ///< graphs that are being captured

/// Counts a call of the runtime's function, for fake_calls().
void count(const char* name);

/// For every function that has the host wait for the device: an error while fake_forbid_waits is on.
cudaError_t wait(const char* name);

/// Remembers the text for cudaGetErrorString, and returns `code`.
cudaError_t fail(cudaError_t code, const std::string& why);

struct Graph {
  std::vector<std::function<cudaError_t()>> work;
  bool invalid = false;  ///< what no capture allows was asked for
};
struct Stream {
  int device = 0;
  unsigned long long id = 0;  ///< of no other stream of the program
  Graph* capturing = nullptr;
  bool kernel_in_front = false;  ///< the last work was a kernel
};
/// Every device has a null stream of its own.
Stream& stream_of(cudaStream_t stream);

/// Does `work` now, or notes it down if the stream is being captured.
cudaError_t enqueue(cudaStream_t stream, bool kernel, std::function<cudaError_t()> work);

}  // namespace fake
