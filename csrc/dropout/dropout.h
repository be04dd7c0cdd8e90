// Dropout, with an addition behind it.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"
#include "dropout/formula.h"

namespace ak {

/// out = dropout(x) + residual: `count` elements each without gaps, each fp16, bf16 or fp32. No residual is null.
struct Dropout {
  const void *x, *residual;
  const int64_t* seed;
  void* out;
  DType x_type, residual_type, out_type;
  int64_t count;
  DropoutRate rate;
};

Status dropout(const Dropout& problem, Stream stream);

}  // namespace ak
