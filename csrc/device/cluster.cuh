#pragma once
// Clusters: blocks of one GPC that can access each other's shared memory (sm_90).
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/cluster.h"
#else

namespace ak {

/// This block's rank in its cluster.
AK_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Barrier and memory ordering among all threads of the cluster. A block must not exit while a peer may still access
/// its shared memory, so kernels end with it.
AK_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace ak
#endif
