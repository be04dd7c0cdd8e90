#pragma once
// wgmma: four warps multiply tiles straight from shared memory, asynchronously (sm_90a).
//
//   wgmma_fence();                                  // the registers below were last touched by ordinary instructions
//   wgmma<bf16, kA, kB>(d, desc_a, desc_b, true);   // d[64 x N] (+)= A[64 x 16] B[16 x N], several of them in order
//   wgmma_commit();
//   wgmma_wait<0>();                                // only now may d be read, or the shared memory be overwritten
//
// Thread t of the warpgroup holds, of d, rows 16 (t / 32) + (t % 32) / 4 and 8 more, columns 8 j + 2 (t % 4) and the
// next: d[4 j + 2 h + c] is row h of those, column c of those, for j = 0 .. N / 8 - 1.
#include "base/half.h"
#include "device/mma.cuh"
#include "device/platform.cuh"
#include "device/tensor_map.cuh"

namespace ak {

/// Shared memory descriptor of an operand tile. K-major: `leading` is not used, `stride` is the distance between groups
/// of 8 rows. MN-major: `leading` is the distance between swizzle rows' worth of m or n (64 elements at 128 bytes),
/// `stride` between groups of 8 k. The tile must start where the swizzle pattern does (at a multiple of 1024, 512 or
/// 256 bytes), but for the k steps within a K-major row.
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

/// Orders this thread's accesses to accumulator registers with the wgmma that follow. Needed before the first one, and
/// whenever an ordinary instruction has touched the registers since.
AK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Keeps the compiler from moving copies of accumulators past this point. Between main loop and epilogue: a copy that
/// ends up between a fence and its wgmma makes ptxas run every wgmma by itself (its remark C7520).
template <int kRegisters>
AK_DEVICE void wgmma_pin(float (&d)[kRegisters]) {
  AK_UNROLL
  for (int i = 0; i < kRegisters; i++) asm volatile("" : "+f"(d[i])::"memory");
}
/// Closes a group: the wgmma issued since the last one.
AK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits for all but the last N groups. With N > 0 the accumulators still belong to the tensor core.
template <int N>
AK_DEVICE void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

}  // namespace ak
#endif
