#pragma once
// Functions that the hardware approximates, in a unit of its own beside the arithmetic ones. For what is measured
// against a bound; formulas whose bits count are the families'.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/approx.h"
#else

namespace ak {

/// 2^x to 2^-22 of the result (PTX ISA, ex2.approx.ftz.f32). Results below 2^-126 are 0.
AK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ak
#endif
