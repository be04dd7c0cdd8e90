#pragma once
// device/approx.cuh on the emulator: the exact function, flushed to normal fp32. A GPU's last bits may differ within
// the instruction's error bound.
#include <cmath>

namespace ak {

inline float exp2_approx(float x) {
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));  // rounded once
  return y < 0x1p-126f ? 0.0f : y;
}

inline float reciprocal_approx(float x) {
  const float y = std::fabs(x) < 0x1p-126f ? std::copysign(INFINITY, x) : 1.0f / x;
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y;
}

inline float rsqrt_approx(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(INFINITY, x)
                                  : static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}

}  // namespace ak
