// The calls of an elementwise activation and of its gradient.
#pragma once
#include <cstdint>

#include "activation/formula.h"
#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// out = activation(z): dense, fp16, bf16 or fp32. z is [rows, columns], out too, but swiglu halves the columns.
struct ActivationForward {
  const void* z;
  void* out;
  DType type;
  int64_t rows, columns;
  Activation activation;
};

Status activation_forward(const ActivationForward& call, Stream stream);

/// out = grad * activation'(z). z and out are [rows, columns] of `type`; grad, of `type` or fp32, has the shape of
/// activation(z). All are dense.
struct ActivationBackward {
  const void* grad;
  const void* z;
  void* out;
  DType grad_type, type;
  int64_t rows, columns;
  Activation activation;
};

Status activation_backward(const ActivationBackward& call, Stream stream);

/// On the CPU only: also writes the sums of the columns of out, as rounded.
void activation_backward_with_sums(const ActivationBackward& call, float* sums);

}  // namespace ak
