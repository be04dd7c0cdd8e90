#pragma once
// device/registers.cuh on the emulator: a pool of registers per block; an increase waits until enough are free.
#include "emulator/machine.h"

namespace ak {
namespace emu {

void change_registers(int wanted, bool increase);

}  // namespace emu

template <int N>
void registers_decrease() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg takes a multiple of 8 from 24 to 256");
  emu::enter("registers_decrease");
  emu::change_registers(N, false);
}
template <int N>
void registers_increase() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "setmaxnreg takes a multiple of 8 from 24 to 256");
  emu::enter("registers_increase");
  emu::change_registers(N, true);
}

}  // namespace ak
