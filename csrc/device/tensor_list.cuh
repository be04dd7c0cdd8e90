// A list of tensors inside the kernel arguments, and the map from a flat chunk number to a piece of one of them.
//
// A launch that serves hundreds of tensors needs their addresses. Put into the kernel arguments they cost a few
// microseconds of host time and nothing else: no table on the device, no upload, nothing that goes stale, and a CUDA
// graph keeps its own copy. Every tensor is cut into chunks of kChunk elements, numbered through the whole list; blocks
// take chunks in turn and find the tensor by bisecting the running totals. Small and large tensors, dtypes and
// parameter groups so share one launch and one tail.
#pragma once
#include <cstdint>

#include "base/config.h"
#include "base/dtype.h"

namespace ak {

#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
#error "amp_kernels needs CUDA 12.1 or newer: before it, a launch takes 4,096 bytes of arguments"
#endif
/// Bytes of arguments a launch may carry (compute capability 7.0 and newer, CUDA 12.1 and newer).
inline constexpr int kArgumentBytes = 32764;
/// What every driver takes, and the most that a short list should cost: each launch copies its arguments.
inline constexpr int kFewArgumentBytes = 4096;

/// Elements of a chunk: enough to hide the search for its tensor, few enough that the last round of blocks is short. A
/// multiple of 16, so that a tensor whose first element is aligned has aligned chunks.
inline constexpr int kChunk = 16384;

struct TensorChunk {
  int tensor;     ///< position in the launch's list
  int64_t begin;  ///< first element
  int count;      ///< elements, 1..kChunk
};

/// Sizes of up to N tensors, none of them empty.
template <int N>
struct ChunkMap {
  int tensors;
  uint32_t chunks;  ///< of all tensors
  uint32_t end[N];  ///< chunks of tensors 0..i: tensor i owns the chunks [end[i - 1], end[i])
  int64_t numel[N];

  /// The chunk numbered `index` < chunks. `hint` is a tensor at or before the answer: blocks walk upwards, and in a
  /// large tensor the next chunk mostly belongs to the tensor of the last one.
  AK_HD TensorChunk find(uint32_t index, int hint) const {
    int low = hint, high = tensors - 1;
    if (index < end[low]) high = low;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (index < end[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t begin = static_cast<int64_t>(index - (low == 0 ? 0 : end[low - 1])) * kChunk;
    const int64_t left = numel[low] - begin;
    return {low, begin, left < kChunk ? static_cast<int>(left) : kChunk};
  }
};

}  // namespace ak
