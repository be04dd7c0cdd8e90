#pragma once
// device/dependent_launch.cuh on the emulator: launches run one after the other; what is checked is that a kernel which
// may overlap the one in front touches no global memory before it has waited.
#include "emulator/machine.h"

namespace ak {

inline void wait_for_previous_kernel() {
  emu::enter("wait_for_previous_kernel");
  emu::current->previous_done = true;
}
inline void allow_next_kernel() { emu::enter("allow_next_kernel"); }

}  // namespace ak
