// The call of the cross-entropy of rows of logits, and of its gradient.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "loss/formula.h"

namespace ak {

inline constexpr int64_t kMaxClasses = int64_t{1} << 30;

/// `logits` and `grad` (may be null, and may be the logits) have rows of `classes` adjacent fp16, bf16 or fp32 values;
/// a gradient of fp32 logits may be any of these, another one has their type. `target` has a class a row (int64) or,
/// with `soft`, rows of probabilities. `weight` (may be null): one a class. `factor` multiplies the gradient of each
/// row. Strides are in elements from row to row.
///
/// More for fp32 logits, null without: a row's logits are divided by its `temperature`. `statistics` are written,
/// `statistics_count` values a row, each `statistics_stride` behind the one before: the largest logit m, the sum of
/// exp(x - m) and, as the third, that of (x - m) exp(x - m): 0, 1, 0 for an ignored row. `known` are these of a call
/// before, for a gradient of plain terms (no weight, no probabilities, own = 1) from one read of the logits: a class
/// that is out of range is then no column's. `entropy_factor` adds the gradient of the rows' entropies times itself.
struct CrossEntropyRows {
  const void* logits;
  const void* target;
  const float* weight;
  const float* factor;
  float* loss;  // null with `known`
  void* grad;
  int64_t rows;
  int classes;  // at most kMaxClasses
  int64_t logits_stride, target_stride, factor_stride, grad_stride;
  int64_t ignore_index;
  CrossEntropyTerms terms;
  DType type, target_type;  // target_type: of probabilities
  bool soft;
  DType grad_type;
  const float* temperature = nullptr;
  const float* known = nullptr;
  const float* entropy_factor = nullptr;
  float* statistics = nullptr;
  int64_t temperature_stride = 0, known_stride = 0, entropy_stride = 0, statistics_stride = 0;
  int statistics_count = 0;
};

/// A class that is out of range and not ignore_index makes NaN on a GPU; on the CPU there must be none.
Status cross_entropy_rows(const CrossEntropyRows& call, Stream stream);

}  // namespace ak
