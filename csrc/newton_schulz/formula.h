// The order of the sums of squares, and the factor that they make, as CPU and GPU have it. The sums are float64: the
// square of no narrower number overflows or vanishes in it.
//
// Lane l of 32 adds the squares of columns l, l + 32, ... of a row, and the lanes add up as a tree. Likewise 256
// threads add rows. So a matrix's sum depends on nothing but the matrix.
#pragma once
#include <cmath>

#include "base/rounding.h"

namespace ak {

inline constexpr int kUnitThreads = 256;

/// 1 / max(norm, eps), NaN for a norm that is NaN.
AK_HD double unit_factor(double sum_of_squares, double eps) {
  const double norm = std::sqrt(sum_of_squares);
  return 1.0 / (norm < eps ? eps : norm);
}

AK_HD float unit_element(float x, double factor) { return static_cast<float>(x * factor); }

}  // namespace ak
