// Layer norm and RMS norm of rows, with an addition in front.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "dropout/formula.h"

namespace ak {

/// x, residual, sum and y are rows x columns without gaps, columns at most kMaxColumns; fp16, bf16 or fp32, sum in the
/// type of residual. Null stands for no weight, bias, residual (and sum), and for no mean: then the norm is RMS norm.
/// With a seed, of which `mask` tells, the sum is dropout(x) + residual.
struct NormForward {
  const void *x, *residual, *weight, *bias;
  void *sum, *y;
  float *mean, *rstd;
  DType x_type, residual_type, weight_type, bias_type, y_type;
  int64_t rows;
  int columns;
  float eps;
  DropoutMask mask;
};
inline constexpr int64_t kMaxColumns = int64_t{1} << 30;

Status norm_forward(const NormForward& problem, Stream stream);

}  // namespace ak
