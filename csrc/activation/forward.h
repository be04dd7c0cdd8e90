// An activation, elementwise.
#pragma once
#include <cstdint>

#include "activation/formula.h"
#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// `z` is rows x columns, `out` too, but with swiglu it has half the columns; both without gaps, fp16, bf16 or fp32.
struct ActivationForward {
  const void* z;
  void* out;
  DType type;
  int64_t rows, columns;
  Activation activation;
};

Status activation_forward(const ActivationForward& problem, Stream stream);

}  // namespace ak
