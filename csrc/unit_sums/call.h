// The call of unit_sums_: sums over rows in an order that no split of the rows at a multiple of 64 changes.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "norm/formula.h"

namespace ak {

inline constexpr int64_t kUnitRows = 64;

/// sums[c] = (fresh ? 0 : sums[c]) + unit 0 + unit 1 + ..., where a unit is the chain from zero over its kUnitRows rows
/// of grad[r, c], or with x of grad[r, c] * normalized(x[r, c], mean[r], rstd[r]). Matrices are dense, rows x columns;
/// mean may be null.
struct UnitSums {
  float* sums;
  const void *grad, *x;
  const float *mean, *rstd;
  float* units;  // scratch: a row of sums for each unit; the CPU needs none
  DType grad_type, x_type;
  int64_t rows;
  int columns;
  bool fresh;

  int64_t unit_count() const { return (rows + kUnitRows - 1) / kUnitRows; }
};

Status unit_sums(const UnitSums& call, Stream stream);

}  // namespace ak
