#pragma once
// mbarriers: 8 bytes of shared memory that count thread arrivals and bytes of asynchronous copies (sm_90). A phase
// completes when all arrivals and expected bytes are in; then the counts restart. Barriers are addressed by 32-bit
// shared addresses.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/mbarrier.h"
#else

namespace ak {

/// Called by one thread: initializes a barrier for `arrivals` arrivals per phase. Other threads may use it after
/// mbarrier_init_fence() and a barrier.
AK_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/// Makes this thread's initializations visible to the async proxy (TMA) and to the other blocks of the cluster.
AK_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives with release semantics: waiting threads see this thread's earlier memory accesses.
AK_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and adds `bytes` to the bytes expected in this phase: the full size of every copy that signals this barrier,
/// including elements out of bounds and multicasts by peers.
AK_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives on the barrier at the same address in block `cta` of the cluster, which may be this block. Without
/// .release.cluster, which compiles to a GPU-wide memory barrier and cost a GEMM a sixth of its speed.
AK_DEVICE void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(
          barrier),
      "r"(cta)
      : "memory");
}
/// Waits until the phase of parity `parity` has completed. The first phase has parity 0; on a fresh barrier a wait for
/// parity 1 returns at once.
AK_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred P1;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n@P1 bra.uni L2;\nbra.uni "
      "L1;\nL2:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ak
#endif
