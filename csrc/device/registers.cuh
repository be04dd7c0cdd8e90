#pragma once
// setmaxnreg: a warpgroup gives registers back, another one takes them (sm_90). All warps of the warpgroup must execute
// it. The kernel needs AK_KERNEL(threads, 1), or ptxas ignores it; the sum over the warpgroups must fit what the launch
// was given.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/registers.h"
#else

namespace ak {

/// This warpgroup keeps N registers a thread (a multiple of 8, 24 to 256), fewer than it had.
template <int N>
AK_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
/// Waits until enough registers are free, then owns N a thread.
template <int N>
AK_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace ak
#endif
