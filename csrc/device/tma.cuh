#pragma once
// TMA: one thread asks, the copy engine moves a whole box between global and shared memory (sm_90).
//
// Loads end on an mbarrier; parts of the box outside the tensor become zeros. Stores and reductions end in bulk groups
// of the thread that issued them; parts outside are left out. The engine is another *proxy*: what threads wrote to
// shared memory it sees only after fence_proxy_async() by the writers and a barrier, and the same holds before it
// overwrites what threads have read.
#include "device/platform.cuh"
#include "device/tensor_map.cuh"

#ifdef AK_EMULATE
#include "emulator/tma.h"
#else

namespace ak {

/// Fetches the map itself, so that the first copy need not wait for it.
AK_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Box at (x, y) to shared address `to`; its bytes count on `barrier` of this block.
AK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
AK_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/// The same into every block of the cluster whose bit is set in `blocks`, at the same addresses, counting on each
/// block's own barrier.
AK_DEVICE void tma_load_multicast(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z,
                                  uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

/// Asks for a box to be in L2 soon. Nobody waits for it.
AK_DEVICE void tma_prefetch(const TensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

/// Box from shared address `from` to (x, y).
AK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}
AK_DEVICE void tma_store(const TensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// The same, but adds to what is there (fp32).
AK_DEVICE void tma_reduce_add(const TensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y)
               : "memory");
}
AK_DEVICE void tma_reduce_add(const TensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}

/// Closes a group: the stores this thread issued since the last one.
AK_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the last N groups of this thread have read their shared memory, which may then be written again.
template <int N>
AK_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/// Waits until all but the last N groups of this thread are complete in global memory.
template <int N>
AK_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
/// Orders this thread's accesses to shared memory with those of the copy engine and of wgmma.
AK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ak
#endif
