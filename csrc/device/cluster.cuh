#pragma once
// Clusters: blocks of one GPC that can access each other's shared memory (sm_90).
#include "device/platform.cuh"

namespace ak {

/// True if the code that is being compiled may use clusters.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

}  // namespace ak

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
/// Stores two floats at the shared address in block `cta` of the cluster, which may be this block. The 8 bytes complete
/// on the mbarrier at address `barrier` there: threads that wait on it see them, and this thread's earlier accesses.
AK_DEVICE void store_cluster_2(uint32_t address, uint32_t barrier, uint32_t cta, float x, float y) {
  asm volatile(
      "{\n.reg .b32 to, bar;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [bar];\n}" ::"r"(address),
      "r"(barrier), "r"(cta), "f"(x), "f"(y)
      : "memory");
}

}  // namespace ak
#endif
