#pragma once
// Clusters: a few blocks on neighbouring SMs that can reach each other's shared memory (sm_90).
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/cluster.h"
#else

namespace ak {

/// This block's place in its cluster.
AK_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// All threads of all blocks of the cluster wait for each other, and see each other's earlier memory accesses. A block
/// must not exit while a peer may still touch its shared memory: end with this.
AK_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace ak
#endif
