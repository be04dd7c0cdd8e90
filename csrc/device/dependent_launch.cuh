#pragma once
// Programmatic dependent launch (sm_90): a kernel launched with LaunchConfig::overlap_previous starts its prologue
// while the previous kernel still runs.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/dependent_launch.h"
#else

namespace ak {

/// Waits until the previous kernel is complete and its writes are visible. Every thread calls it before its first
/// access to global memory.
AK_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Lets the next kernel start its prologue, once all blocks have called it or exited.
AK_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ak
#endif
