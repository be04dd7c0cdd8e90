#pragma once
// device/approx.cuh on the emulator: the exact function, flushed to normal fp32. A GPU's last bits may differ within
// the instruction's error bound.
#include <cmath>

namespace ak {

inline float exp2_approx(float x) {
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));  // rounded once
  return y < 0x1p-126f ? 0.0f : y;
}

}  // namespace ak
