// activation_backward and the sums of its columns over plain pointers to dense rows, for a caller that has checked what
// the ops check and calls from C++ (csrc/autograd/linear.cpp). False if the portable path is the one to take
// (gemm_isa.h), which leaves sums to ATen: then nothing was done.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "activation/formula.h"

namespace ak {

using torch::headeronly::ScalarType;

struct ActivationBackwardCall {
  Activation activation;
  const void *grad, *preact;
  void* dz;
  ScalarType type;      // of the three: fp16, bf16 or fp32
  int64_t rows, width;  // of preact and dz
  float* sums;          // `width` of them: of the columns of dz as it is rounded
};

__attribute__((visibility("default"))) bool activation_backward_call(const ActivationBackwardCall& call);

// sums[c] = the sum of column c of a matrix, [rows, width].
__attribute__((visibility("default"))) bool column_sums_call(const void* matrix, ScalarType type, int64_t rows,
                                                             int64_t width, float* sums);

}  // namespace ak
