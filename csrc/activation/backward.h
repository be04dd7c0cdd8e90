// The gradient of an activation, elementwise.
#pragma once
#include <cstdint>

#include "activation/formula.h"
#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// `z` and `out` are rows x columns, `grad` too, but with swiglu it has half the columns; all without gaps. Types:
/// fp16, bf16 or fp32 for z and out, the same or fp32 for grad.
struct ActivationGradient {
  const void* grad;
  const void* z;
  void* out;
  DType grad_type, type;
  int64_t rows, columns;
  Activation activation;
};

Status activation_backward(const ActivationGradient& problem, Stream stream);

}  // namespace ak
