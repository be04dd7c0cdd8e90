// Cross-entropy of rows of logits and its gradient.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "loss/formula.h"

namespace ak {

/// `logits` and `grad` (may be null, and may be the logits) have rows of `classes` adjacent fp16, bf16 or fp32 values;
/// `target` has a class a row (int64) or, with `soft`, rows of probabilities. `weight` (may be null): one a class.
/// `factor`: what the gradient of each row is multiplied by. Strides are in elements from row to row.
struct CrossEntropyRows {
  const void* logits;
  const void* target;
  const float* weight;
  const float* factor;
  float* loss;
  void* grad;
  int64_t rows;
  int classes;
  int64_t logits_stride, target_stride, factor_stride, grad_stride;
  int64_t ignore_index;
  CrossEntropyTerms terms;
  DType type, target_type;  // target_type: of probabilities
  bool soft;
};

Status cross_entropy_rows(const CrossEntropyRows& problem, Stream stream);

}  // namespace ak
