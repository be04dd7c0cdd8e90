// The norm that an argument `norm_type` asks for.
#pragma once

#include <limits>

#include "base/check.h"
#include "gradients/grad_norm.h"

namespace ak {

inline Norm norm_of(const char* op, double norm_type) {
  if (norm_type == 2.0) return Norm::kSumOfSquares;
  if (norm_type == std::numeric_limits<double>::infinity()) return Norm::kLargest;
  fail(op, ": norm_type must be 2.0 or inf; got ", norm_type);
}

}  // namespace ak
