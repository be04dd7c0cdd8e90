#pragma once
// Approximate functions of the special function unit, for results with an error bound. Results that must have the same
// bits everywhere use the formulas of the families.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/approx.h"
#else

namespace ak {

/// 2^x with a relative error of 2^-22 (PTX ISA, ex2.approx.ftz.f32). Results below 2^-126 are 0.
AK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ak
#endif
