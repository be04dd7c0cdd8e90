// softmax_rows and softmax_rows_backward over plain pointers to dense rows, for a caller that has checked what the ops
// check and calls from C++ (csrc/autograd/softmax.cpp).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace ak {

using torch::headeronly::ScalarType;  // fp16, bf16 or fp32 in all of this

// True where an element counts: [a, b, c, columns], the columns adjacent; none without data.
struct SoftmaxMask {
  const bool* data = nullptr;
  int64_t b = 1, c = 1;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;

  const bool* row(int64_t r) const {
    const int64_t rest = r / c;
    return data + rest / b * a_stride + rest % b * b_stride + r % c * c_stride;
  }
};

struct SoftmaxCall {
  const void* x;
  ScalarType x_type;
  SoftmaxMask mask;
  bool safe;
  int64_t rows, columns;
  void* y;
  ScalarType y_type;
  float* statistics;  // [2, rows], of log-softmax; null makes it softmax
};

__attribute__((visibility("default"))) void softmax_call(const SoftmaxCall& call);

struct SoftmaxBackwardCall {
  const void* grad;
  ScalarType grad_type;
  const void* of;  // the result of softmax, the input of log-softmax
  ScalarType of_type;
  const float* statistics;
  SoftmaxMask mask;  // what it leaves out has no gradient
  int64_t rows, columns;
  void* grad_x;
  ScalarType grad_x_type;
};

__attribute__((visibility("default"))) void softmax_backward_call(const SoftmaxBackwardCall& call);

}  // namespace ak
