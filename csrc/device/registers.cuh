#pragma once
// setmaxnreg: redistributes registers among warpgroups (sm_90). All warps of the warpgroup must execute it. ptxas
// ignores it unless the kernel is AK_KERNEL(threads, 1). The sum over the warpgroups may not exceed the launch's
// allocation.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/registers.h"
#else

namespace ak {

/// Releases registers down to N per thread (a multiple of 8, 24 to 256).
template <int N>
AK_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
/// Waits until enough registers are free, then raises this warpgroup to N per thread.
template <int N>
AK_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace ak
#endif
