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

/// Maximum blocks of a grid per SM: several whole waves of 8, 6 or 4, so that faster SMs do more.
inline constexpr int kElementGridPerSm = 24;

/// Elements per vector for operands of types T.
template <class... T>
inline constexpr int kVectorOf = 16 / std::max({sizeof(T)...});

/// Calls f(i) for this thread's share of i < count.
template <class F>
AK_DEVICE void for_each_in_grid(int64_t count, F f) {
  const int64_t stride = static_cast<int64_t>(grid_blocks()) * kElementThreads;
  for (int64_t i = static_cast<int64_t>(block_index()) * kElementThreads + thread_index(); i < count; i += stride) f(i);
}

/// Calls f<n>(first) for this thread's share of `count` elements: n is kVec, or 1 for the elements after the last
/// vector.
template <int kVec, class F>
AK_DEVICE void for_each_vector_of(int64_t count, F f) {
  const int64_t vectors = count / kVec;
  for_each_in_grid(vectors, [&](int64_t i) { f.template operator()<kVec>(i * kVec); });
  const int64_t rest = vectors * kVec + static_cast<int64_t>(block_index()) * kElementThreads + thread_index();
  if (rest < count) f.template operator()<1>(rest);
}

/// Launch of a kernel over `count` vectors, which begins with wait_for_previous_kernel().
inline LaunchConfig elementwise_launch(const char* name, int64_t count, Stream stream) {
  const int64_t blocks = (std::max<int64_t>(1, count) + kElementThreads - 1) / kElementThreads;
  return {.name = name,
          .grid = static_cast<int>(std::min<int64_t>(blocks, device_sm_count() * kElementGridPerSm)),
          .block = kElementThreads,
          .overlap_previous = true,
          .stream = stream};
}

}  // namespace ak
