#pragma once
// Roots and quotients without special cases, in a third of the instructions: an approximation of the special function
// unit and the corrections with which nvcc rounds it, but neither tests nor branches. The bits are those of AllNumbers
// (update/rule.h) where no step leaves the normal numbers.
#include "device/approx.cuh"
#include "update/rule.h"

namespace ak {

struct NormalNumbers {
  /// x = 0, or 2^-101 <= x < inf.
  static AK_DEVICE float sqrt(float x) {
    const float reciprocal = rsqrt_approx(x + 0x1p-126f);  // x itself, or finite for 0
    const float root = x * reciprocal;
    return fma(fma(-root, root, x), 0.5f * reciprocal, root);
  }
  /// 2^-126 < |b| < 2^126, |a| >= 2^-101 or +0, and so |a / b| >= 2^-126.
  static AK_DEVICE float div(float a, float b) {
    float reciprocal = reciprocal_approx(b);
    reciprocal = fma(reciprocal, fma(-b, reciprocal, 1.0f), reciprocal);
    const float quotient = a * reciprocal;
    return fma(reciprocal, fma(-b, quotient, a), quotient);
  }
  /// 0 <= x < inf.
  static AK_DEVICE float divide(float x, float c, float reciprocal) { return divide_number(x, c, reciprocal); }
};

}  // namespace ak
