// The call of dropout, with an addition after it.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "dropout/formula.h"

namespace ak {

/// out = dropout(x) + residual: `count` elements each, dense, fp16, bf16 or fp32. residual may be null.
struct Dropout {
  const void *x, *residual;
  const int64_t* seed;
  void* out;
  DType x_type, residual_type, out_type;
  int64_t count;
  DropoutRate rate;
};

Status dropout(const Dropout& call, Stream stream);

}  // namespace ak
