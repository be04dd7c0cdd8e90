// gemm and its kin over plain pointers, for a caller that has checked what the ops check and calls from C++
// (csrc/autograd/linear.cpp): no dispatcher, no boxes, no tensors but the result. Torch-free.
#pragma once

#include <cstdint>

#include "activation/formula.h"
#include "base/dtype.h"

namespace ak {

// Element (i, j) lies at data + i * row_stride + j * column_stride elements. A stride of 1 is wanted in a dimension of
// more than one element, if there is any.
struct StridedMatrix {
  const void* data;
  int64_t row_stride, column_stride;
};

// out = activation(a @ b + bias), and preact = a @ b + bias if that is not null.
struct GemmCall {
  StridedMatrix a, b;  // [m, k] and [k, n] of `operands`, fp16 or bf16
  int64_t m, n, k;
  DType operands;
  const void* bias;  // n values, or null
  DType bias_type;
  Activation activation;
  void* out;     // [m, n], for a gated activation [m, n / 2], contiguous, of out_type
  void* preact;  // [m, n], contiguous, of out_type
  DType out_type;
};

// False if the portable path is the one to take, which needs tensors: then nothing was done.
bool gemm_call(const GemmCall& call);

// sums[c] = the sum of column c of a dense matrix of fp16, bf16 or fp32, [rows, width]. False as above.
bool column_sums_call(const void* matrix, DType type, int64_t rows, int64_t width, float* sums);

}  // namespace ak
