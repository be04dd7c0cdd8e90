// The calls of layer norm and RMS norm of rows, and of their gradients.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

inline constexpr int64_t kMaxColumns = int64_t{1} << 30;

/// y = norm(s) * weight + bias of the rows of s = x or s = x + residual. x, residual, sum and y are dense, [rows,
/// columns], fp16, bf16 or fp32; `sum` receives s in the type of residual. weight, bias, residual and sum may be null;
/// without mean it is RMS norm.
struct NormForward {
  const void *x, *residual, *weight, *bias;
  void *sum, *y;
  float *mean, *rstd;  // [rows]
  DType x_type, residual_type, weight_type, bias_type, y_type;
  int64_t rows;
  int columns;  // at most kMaxColumns
  float eps;
};

Status norm_forward(const NormForward& call, Stream stream);

/// grad, x (the sum if there was a residual), grad_sum and out are dense, [rows, columns]; out, the gradient of x, has
/// its type. mean, weight, grad_sum and branch may be null. `branch` receives the gradient of what was added to the
/// residual: `out` as rounded.
struct NormBackward {
  const void *grad, *x, *weight, *grad_sum;
  const float *mean, *rstd;
  void *out, *branch;
  float* slots;  // scratch of norm_backward_slots floats
  float* sums;   // [parameters, columns]: the gradient of the weight, then of the bias
  DType grad_type, x_type, weight_type, grad_sum_type, branch_type;
  int64_t rows;
  int columns;
  int parameters;  // 0, 1 (weight) or 2 (weight and bias)
};

/// Floats of scratch on the current device; the CPU needs none.
int64_t norm_backward_slots(int64_t rows, int columns, int parameters);
/// The bits of the result depend on values, types, shape, alignments and the device alone.
Status norm_backward(const NormBackward& call, Stream stream);

}  // namespace ak
