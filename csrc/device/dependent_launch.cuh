#pragma once
// Programmatic dependent launch (sm_90): a kernel launched with LaunchConfig::overlap_previous starts its prologue
// while the previous kernel still runs. In code for older chips both functions do nothing, and launch() then does not
// let kernels overlap.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/dependent_launch.h"
#else

namespace ak {

/// Waits until the previous kernel is complete and its writes are visible. Every thread calls it before its first
/// access to global memory.
AK_DEVICE void wait_for_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the next kernel start its prologue, once all blocks have called it or exited.
AK_DEVICE void allow_next_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ak
#endif
