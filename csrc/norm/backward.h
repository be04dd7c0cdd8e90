// The gradients of layer norm and RMS norm.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "dropout/formula.h"

namespace ak {

/// grad, x, grad_sum and out are rows x columns without gaps, columns at most kMaxColumns (norm_forward.h), out in the
/// type of x. Null stands for no mean (RMS norm), weight or grad_sum. `sums` is [parameters, columns], with
/// `parameters` 0, 1 (of the weight) or 2 (and of the bias). `branch` is null, or becomes the gradient of the branch
/// that was added to a residual: `out` as it was rounded, through the dropout of `mask`, if that has a seed.
struct NormBackward {
  const void *grad, *x, *weight, *grad_sum;
  const float *mean, *rstd;
  void *out, *branch;
  float *slots, *sums;
  DType grad_type, x_type, weight_type, grad_sum_type, branch_type;
  int64_t rows;
  int columns;
  int parameters;
  DropoutMask mask;
};

/// Floats that `slots` has room for on the current device.
int64_t norm_backward_slots_size(int64_t rows, int columns, int parameters);
/// The result depends on the values, types, the shape, alignments and the device alone: the same call gives the same
/// bits.
Status norm_backward(const NormBackward& problem, Stream stream);

}  // namespace ak
