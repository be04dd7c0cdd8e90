// The gradients of layer norm and RMS norm.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// grad, x, grad_sum and out are rows x columns without gaps, columns at most kMaxColumns (norm_forward.h), out in the
/// type of x. Null stands for no mean (RMS norm), weight or grad_sum. `sums` is [parameters, columns], with
/// `parameters` 0, 1 (of the weight) or 2 (and of the bias).
struct NormBackward {
  const void *grad, *x, *weight, *grad_sum;
  const float *mean, *rstd;
  void* out;
  float *slots, *sums;
  DType grad_type, x_type, weight_type, grad_sum_type;
  int64_t rows;
  int columns;
  int parameters;
};

/// Floats that `slots` has room for on the current device.
int64_t norm_backward_slots_size(int64_t rows, int columns, int parameters);
/// The result depends on the values, the shape, alignments and the number of SMs alone: the same call gives the same
/// bits.
Status norm_backward(const NormBackward& problem, Stream stream);

}  // namespace ak
