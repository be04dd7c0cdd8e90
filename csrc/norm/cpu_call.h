// norm_forward and norm_backward over plain pointers to dense rows, for a caller that has checked what the ops check
// and calls from C++ (csrc/autograd/norm.cpp).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "dropout/formula.h"

namespace ak {

using torch::headeronly::ScalarType;  // fp16, bf16 or fp32 in all of this

// One value per column, or none.
struct NormParameter {
  const void* data = nullptr;
  ScalarType type = ScalarType::Float;
};

// Where the sums over the rows that are the gradient of a parameter go, rounded once; nowhere without data.
struct NormSums {
  void* data = nullptr;
  ScalarType type = ScalarType::Float;
};

struct NormForwardCall {
  const void* x;
  ScalarType x_type;
  NormParameter weight, bias;
  const void* residual;  // of sum_type, or null
  ScalarType sum_type;
  float eps;
  int64_t rows, columns;
  void* y;
  ScalarType y_type;
  void* sum;    // where there is a residual
  float* mean;  // `rows` of them; null for RMS norm
  float* rstd;
  DropoutMask mask{};  // with a seed, the sum is dropout(x) + residual
};

__attribute__((visibility("default"))) void norm_forward_call(const NormForwardCall& call);

struct NormBackwardCall {
  const void* grad;
  ScalarType grad_type;
  const void* x;  // or the sum with the residual
  ScalarType x_type;
  const float *mean, *rstd;  // no mean: RMS norm
  NormParameter weight;
  const void* grad_sum;  // null, or of grad_sum_type
  ScalarType grad_sum_type;
  int64_t rows, columns;
  void* grad_x;        // of x_type
  int64_t parameters;  // how many sums over the rows are wanted: of the weight, then of the bias
  NormSums of_parameters[2];
  void* branch = nullptr;  // null, or of branch_type: grad_x as it was rounded, through the dropout of the mask
  ScalarType branch_type = ScalarType::Float;
  DropoutMask mask{};
};

__attribute__((visibility("default"))) void norm_backward_call(const NormBackwardCall& call);

}  // namespace ak
