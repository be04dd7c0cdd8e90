#pragma once
// TMA: one thread issues a copy of a whole box between global and shared memory (sm_90).
//
// Loads complete on an mbarrier; elements out of bounds become zeros. Stores and reductions complete in bulk groups of
// the issuing thread; elements out of bounds are skipped. TMA uses the async proxy: it sees threads' writes to shared
// memory only after fence_proxy_async() by the writers and a barrier, and the same holds before it overwrites bytes
// that threads have read.
#include "device/platform.cuh"
#include "device/tensor_map.cuh"

#ifdef AK_EMULATE
#include "emulator/tma.h"
#else

namespace ak {

/// Prefetches the map itself, so that the first copy does not wait for it.
AK_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads the box at (x, y, z) or (x, y, z, w) to shared address `to`; its bytes complete on `barrier`.
AK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
AK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
/// tma_load into every block of the cluster whose bit is set in `blocks`, at the same addresses; completes on each
/// block's own barrier.
AK_DEVICE void tma_load_multicast(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z,
                                  uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

/// Prefetches a box into L2.
AK_DEVICE void tma_prefetch(const TensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

/// Stores the box at shared address `from` to (x, y, z) or (x, y, z, w).
AK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
AK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
/// tma_store that adds to the tensor (fp32).
AK_DEVICE void tma_reduce_add(const TensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}

/// Commits this thread's stores since the last commit as a group.
AK_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the last N groups of this thread have read their shared memory, which may then be overwritten.
template <int N>
AK_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/// Waits until all but the last N groups of this thread are complete in global memory.
template <int N>
AK_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
/// Orders this thread's accesses to shared memory with those of TMA and wgmma.
AK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ak
#endif
