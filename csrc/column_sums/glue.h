// Host code of the ops that sum the columns of a matrix.
#pragma once
#include "base/op_call.h"
#include "column_sums/call.h"
#ifdef AK_ON_CPU
#include <torch/csrc/stable/ops.h>

#include "base/cpu/isa.h"
#endif

namespace ak {

/// ColumnSums::slots of a matrix with columns.
inline float* column_slots(OpCall& call, int64_t rows, int64_t columns) {
  const int64_t shares = ColumnStrips(rows, static_cast<int>(columns)).shares;
  return OpCall::kOnCpu || shares == 1
             ? nullptr
             : static_cast<float*>(call.scratch(static_cast<size_t>(shares * columns) * sizeof(float)));
}

#ifdef AK_ON_CPU
/// True if ATen sums the columns: its bits do not depend on the machine's instructions.
inline bool aten_sums_columns() { return current_isa() == Isa::portable; }

inline Tensor aten_column_sums(const Tensor& x) {
  const int64_t dim = 0;
  return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(&dim, 1), false, ScalarType::Float);
}
#endif

}  // namespace ak
