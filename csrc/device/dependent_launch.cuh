#pragma once
// Programmatic dependent launch (sm_90): a kernel launched with LaunchConfig::overlap_previous starts its prologue
// while the kernel in front of it still runs.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/dependent_launch.h"
#else

namespace ak {

/// Waits until the kernel in front is complete and its writes are visible. Every thread that touches global memory
/// calls it before.
AK_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Lets the kernel behind start its prologue, once all blocks have said so or have exited.
AK_DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ak
#endif
