#pragma once
// wgmma: asynchronous matrix multiplication by a warpgroup, with operands in shared memory (sm_90a).
//
//   wgmma_fence();                                  // d was last accessed by ordinary instructions
//   wgmma<bf16, kA, kB>(d, desc_a, desc_b, true);   // d[64 x N] (+)= A[64 x 16] B[16 x N]; several, in order
//   wgmma_commit();
//   wgmma_wait<0>();                                // now d may be read and the operands overwritten
//
// Thread t of the warpgroup holds rows r = 16 (t / 32) + (t % 32) / 4 and r + 8 of d, columns 8 j + 2 (t % 4) and the
// next: d[4 j + 2 h + c] is the h-th of these rows and the c-th of these columns, for j = 0 .. N / 8 - 1.
#include "base/half.h"
#include "device/mma.cuh"
#include "device/platform.cuh"
#include "device/tensor_map.cuh"

namespace ak {

/// Shared memory descriptor of an operand tile; byte offsets. K-major: `leading` is unused, `stride` is between groups
/// of 8 rows. MN-major: `leading` is between groups of m or n that fill a swizzle row (64 elements at 128 bytes),
/// `stride` is between groups of 8 k. The tile must start at a multiple of the swizzle pattern's size (1024, 512 or 256
/// bytes), except for k steps within a K-major row.
AK_DEVICE uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride,
                                    Swizzle swizzle = Swizzle::k128) {
  const uint64_t mode = swizzle == Swizzle::k128 ? 1 : swizzle == Swizzle::k64 ? 2 : 3;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | mode << 62;
}

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/wgmma.h"
#else
#include "device/wgmma_instances.cuh"

namespace ak {

/// Orders this thread's accesses to accumulator registers before the following wgmma. Needed before the first one and
/// after ordinary instructions have accessed the registers.
AK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Prevents the compiler from moving copies of accumulators across this point, between main loop and epilogue. A copy
/// between a fence and its wgmma makes ptxas serialize every wgmma (its remark C7520).
template <int kRegisters>
AK_DEVICE void wgmma_pin(float (&d)[kRegisters]) {
  AK_UNROLL
  for (int i = 0; i < kRegisters; i++) asm volatile("" : "+f"(d[i])::"memory");
}
/// Commits the wgmma since the last commit as a group.
AK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits for all but the last N groups. With N > 0 the accumulators may not be accessed yet.
template <int N>
AK_DEVICE void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

}  // namespace ak
#endif
