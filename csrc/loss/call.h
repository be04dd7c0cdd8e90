// The call of the cross-entropy of rows of logits, and of its gradient.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "loss/formula.h"

namespace ak {

inline constexpr int64_t kMaxClasses = int64_t{1} << 30;

/// `logits` and `grad` (may be null, and may be the logits) have rows of `classes` adjacent fp16, bf16 or fp32 values;
/// `target` has a class a row (int64) or, with `soft`, rows of probabilities. `weight` (may be null): one a class.
/// `factor` multiplies the gradient of each row. Strides are in elements from row to row.
struct CrossEntropyRows {
  const void* logits;
  const void* target;
  const float* weight;
  const float* factor;
  float* loss;
  void* grad;
  int64_t rows;
  int classes;  // at most kMaxClasses
  int64_t logits_stride, target_stride, factor_stride, grad_stride;
  int64_t ignore_index;
  CrossEntropyTerms terms;
  DType type, target_type;  // target_type: of probabilities
  bool soft;
};

/// A class that is out of range and not ignore_index makes NaN on a GPU; on the CPU there must be none.
Status cross_entropy_rows(const CrossEntropyRows& call, Stream stream);

}  // namespace ak
