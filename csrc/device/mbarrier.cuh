#pragma once
// mbarriers: 8 bytes of shared memory that count arrivals of threads and bytes of asynchronous copies (sm_90). A phase
// ends when all arrivals and all expected bytes are there; then the count starts anew. A barrier is addressed by a
// 32-bit shared address.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/mbarrier.h"
#else

namespace ak {

/// One thread prepares a barrier for `arrivals` arrivals a phase. Others may use it after mbarrier_init_fence() and a
/// barrier.
AK_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/// Makes this thread's initialisations visible to the async proxy (TMA) and to the other blocks of the cluster.
AK_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives: what this thread did before is seen by whoever waits for the phase.
AK_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and adds `bytes` to what this phase waits for. The bytes of every copy that ends here count in full, also
/// those of a box that hangs over the edge of its tensor, and those that a peer's multicast delivers.
AK_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives on the barrier at the same address in block `cta` of the cluster, this block's own included. The plain form
/// on purpose: .release.cluster compiles to a GPU-wide memory barrier, which cost a GEMM a sixth of its speed.
AK_DEVICE void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(
          barrier),
      "r"(cta)
      : "memory");
}
/// Waits until the phase of parity `parity` has ended. The first phase has parity 0; a fresh barrier counts as past
/// parity 1.
AK_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred P1;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n@P1 bra.uni L2;\nbra.uni "
      "L1;\nL2:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ak
#endif
