// gemm and its kin over plain pointers, for a caller that has checked what the ops check and calls from C++
// (csrc/autograd/linear.cpp): no dispatcher, no boxes, no tensors but the result. Torch-free.
#pragma once

#include <cstdint>

#include "activation/formula.h"

namespace ak {

// Element (i, j) lies at data + i * row_stride + j * column_stride elements. A stride of 1 is wanted in a dimension of
// more than one element, if there is any.
struct StridedMatrix {
  const void* data;
  int64_t row_stride, column_stride;
};

enum class Float : int { fp16, bf16, fp32 };

// out = activation(a @ b + bias), and preact = a @ b + bias if that is not null.
struct GemmCall {
  StridedMatrix a, b;  // [m, k] and [k, n] of `operands`, fp16 or bf16
  int64_t m, n, k;
  Float operands;
  const void* bias;  // n values, or null
  Float bias_type;
  Activation activation;
  void* out;     // [m, n], for a gated activation [m, n / 2], contiguous, of out_type
  void* preact;  // [m, n], contiguous, of out_type
  Float out_type;
};

// False if the portable path is the one to take, which needs tensors: then nothing was done.
__attribute__((visibility("default"))) bool gemm_call(const GemmCall& call);

}  // namespace ak
