#pragma once
// Global memory on its way into L2 before somebody asks for it.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/prefetch.h"
#else

namespace ak {

/// Asks for the line around `p` to be in L2 soon. Nobody waits for it. Lines are of 128 bytes; whether a chip then
/// fetches all of one is not measured.
AK_DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace ak
#endif
