#pragma once
// Block-wide operations: barriers, reductions, detection of the last block.
#include "device/atomic.cuh"
#include "device/shared.cuh"
#include "device/warp.cuh"

#ifdef AK_EMULATE
#include "emulator/block.h"
#else

namespace ak {

/// __syncthreads: barrier and memory ordering among all threads of the block.
AK_DEVICE void block_sync() { __syncthreads(); }
/// block_sync for `threads` threads, a multiple of 32, on barrier `id` in [1, 15]; 0 is block_sync's.
AK_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives on barrier `id` without waiting; waiting threads see this thread's earlier memory accesses. `threads` counts
/// arriving and waiting threads.
AK_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ak
#endif

namespace ak {

template <class Op>
struct BlockReduceArray;
struct LastBlockFlag;

/// op over the values of all kThreads threads of the block, in a fixed order, returned to every thread. Consecutive
/// calls need no barrier between them.
template <int kThreads, class T, class Op>
AK_DEVICE T block_reduce(T value, Op op) {
  constexpr int kWarps = kThreads / kWarpThreads;
  auto of_warp = shared<T, kWarps, BlockReduceArray<Op>>();
  value = warp_reduce(value, op);
  block_sync();  // all threads have read the result of an earlier call
  if (lane_index() == 0) of_warp[warp_index()] = value;
  block_sync();
  T total = of_warp[0];
  AK_UNROLL
  for (int i = 1; i < kWarps; i++) total = op(total, static_cast<T>(of_warp[i]));
  return total;
}
template <int kThreads, class T>
AK_DEVICE T block_sum(T value) {
  return block_reduce<kThreads>(value, [](T a, T b) { return a + b; });
}

/// True in all threads of the last block to call it, which then sees all blocks' earlier writes to global memory.
/// `counter` must be 0 before the launch and is 0 again after it.
AK_DEVICE bool last_block_done(uint32_t* counter) {
  auto is_last = shared<uint32_t, 1, LastBlockFlag>();
  const uint32_t last = static_cast<uint32_t>(grid_blocks()) - 1;
  block_sync();  // every thread's writes are ordered before thread 0's release
  if (thread_index() == 0) is_last[0] = atomic_count_acq_rel(counter, last) == last ? 1u : 0u;
  block_sync();
  return is_last[0] != 0u;
}

}  // namespace ak
