// A list of tensors in the kernel arguments, and the map from a global chunk index to a span of one of them.
//
// A launch over hundreds of tensors needs their addresses. As kernel arguments they cost a few microseconds of host
// time, but no table on the device, no upload and no stale copies, and a CUDA graph keeps its own copy. Every tensor is
// cut into chunks of kChunk elements, which are numbered over the whole list; blocks take chunks in turn and find the
// tensor by binary search in the prefix sums. So small and large tensors, dtypes and parameter groups share one launch
// and one tail.
#pragma once
#include <cstdint>

#include "base/config.h"
#include "base/dtype.h"

namespace ak {

#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
#error "amp_kernels needs CUDA 12.1 or newer: before it, a launch takes 4,096 bytes of arguments"
#endif
/// Maximum bytes of kernel arguments (compute capability 7.0 and newer, CUDA 12.1 and newer).
inline constexpr int kArgumentBytes = 32764;
/// Bytes of arguments for short lists, since each launch copies its arguments; also the limit of older drivers.
inline constexpr int kFewArgumentBytes = 4096;

/// Elements per chunk: enough to hide the search for its tensor, few enough for a short tail. A multiple of 16, so that
/// chunks of an aligned tensor are aligned.
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
  uint32_t end[N];  ///< prefix sums: tensor i owns the chunks [end[i - 1], end[i])
  int64_t numel[N];

  /// Chunk `index` < chunks. `hint` is a tensor at or before the result, such as that of the block's previous chunk,
  /// which in large tensors is mostly the same.
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
