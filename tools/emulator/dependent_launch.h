#pragma once
// device/dependent_launch.cuh on the emulator. Launches run one after the other; the emulator checks that a kernel that
// may overlap the previous one accesses no global memory before it has waited.
#include "emulator/machine.h"

namespace ak {

inline void wait_for_previous_kernel() {
  emu::enter("wait_for_previous_kernel");
  emu::current->previous_done = true;
}
inline void allow_next_kernel() { emu::enter("allow_next_kernel"); }

}  // namespace ak
