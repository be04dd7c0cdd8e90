// The calls of an elementwise activation and of its gradient.
#pragma once
#include <cstdint>

#include "activation/formula.h"
#include "base/dtype.h"
#include "column_sums/call.h"
#include "device/status.h"

namespace ak {

/// out = activation(z): dense, fp16, bf16 or fp32. z is [rows, columns], out too, but swiglu halves the columns.
struct ActivationForward {
  const void* z;
  void* out;
  DType type;
  int64_t rows, columns;
  Activation activation;
};

Status activation_forward(const ActivationForward& call, Stream stream);

/// out = grad * activation'(z). z and out are [rows, columns] of `type`; grad, of `type` or fp32, has the shape of
/// activation(z). All are dense.
struct ActivationBackward {
  const void* grad;
  const void* z;
  void* out;
  DType grad_type, type;
  int64_t rows, columns;
  Activation activation;
  float* sums = nullptr;   // of the columns of out as rounded, with the bits of column_sums; none if null
  float* slots = nullptr;  // as in ColumnSums
};

/// The sums in their own call.
AK_HD ColumnSums sums_of(const ActivationBackward& p) {
  return {p.out, p.sums, p.slots, p.type, p.rows, p.columns, static_cast<int>(p.columns)};
}

Status activation_backward(const ActivationBackward& call, Stream stream);

}  // namespace ak
