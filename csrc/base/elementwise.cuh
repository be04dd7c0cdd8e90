// Elementwise pass: a thread takes a vector of elements at a time, 16 bytes of its widest operand, so that every store
// of a warp fills the 32-byte sectors it touches (see cast/cast.cu). Full occupancy provides the bytes in flight.
// Unaligned operands are processed one element at a time.
#pragma once
#include <algorithm>
#include <cstdint>

#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {

inline constexpr int kElementThreads = 256;

/// Blocks per SM, which holds 2,048, 1,536 or 1,024 threads, with 32, 40 or 64 registers each.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
inline constexpr int kElementBlocksPerSm = 4;
#elif defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
inline constexpr int kElementBlocksPerSm = 6;
#else
inline constexpr int kElementBlocksPerSm = 8;
#endif

/// Blocks per SM, at least, for threads with two or three vectors and a position in a row: with fewer than 64 registers
/// loads would be serialized.
inline constexpr int kGatedBlocksPerSm = 4;

/// Elements per vector for operands of types T.
template <class... T>
inline constexpr int kVectorOf = 16 / std::max({sizeof(T)...});

/// Position of this thread in the grid.
AK_DEVICE int64_t grid_thread() { return static_cast<int64_t>(block_index()) * kElementThreads + thread_index(); }

/// Calls f<n>(first) for this thread's share of `count` elements: a vector of n = kVec, and n = 1 for one of the
/// elements after the last vector.
template <int kVec, class F>
AK_DEVICE void for_each_vector_of(int64_t count, F f) {
  const int64_t vectors = count / kVec;
  const int64_t i = grid_thread(), rest = vectors * kVec + i;
  if (i < vectors) f.template operator()<kVec>(i * kVec);
  if (rest < count) f.template operator()<1>(rest);
}

/// Launch of a kernel over `count` vectors, which begins with wait_for_previous_kernel(). A thread has one vector: with
/// a grid of 24 blocks an SM, whose threads took vectors in turn, an H200 reached 91 % of a copy's bandwidth, where
/// Triton and torch, with a block for each tile, reached 99 %. This launch is not timed.
inline LaunchConfig elementwise_launch(const char* name, int64_t count, Stream stream) {
  const int64_t blocks = (std::max<int64_t>(1, count) + kElementThreads - 1) / kElementThreads;
  return {.name = name,
          .grid = static_cast<int>(blocks),
          .block = kElementThreads,
          .overlap_previous = true,
          .stream = stream};
}

}  // namespace ak
