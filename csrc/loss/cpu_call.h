// cross_entropy_rows_ over plain pointers, for a caller that has checked what the op checks and calls from C++
// (csrc/autograd/loss.cpp).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace ak {

using torch::headeronly::ScalarType;

struct CrossEntropyCall {
  const void* logits;  // fp16, bf16 or fp32, classes adjacent
  ScalarType logits_type;
  int64_t logits_stride;  // from row to row
  const int64_t* target;  // in range, or ignore_index
  int64_t target_stride;
  int64_t rows, classes, ignore_index;
  double label_smoothing, z_loss;
  float* loss;   // of each row
  void* grad;    // null, or [rows, classes] of logits_type
  float factor;  // of the gradient of each row
};

__attribute__((visibility("default"))) void cross_entropy_call(const CrossEntropyCall& call);

}  // namespace ak
