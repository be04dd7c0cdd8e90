#pragma once
// Approximate functions of the special function unit, for results with an error bound, or that are corrected. Results
// that must have the same bits everywhere use the formulas of the families.
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

/// 1 / x with a relative error of 2^-23. Subnormal x and results are 0.
AK_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / sqrt(x) with a relative error of 2^-22.9. Subnormal x is 0.
AK_DEVICE float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ak
#endif
