// Softmax and log-softmax of rows, with a mask, and their gradients.
#pragma once
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// Which elements count (a byte that is not 0), or all of them (data is null). The rows of the matrix are numbered
/// through three dimensions, of which the mask may be the same along any: their strides are then 0.
struct RowMask {
  const uint8_t* data;
  int64_t inner[2];    ///< sizes of the last two of the three
  int64_t strides[3];  ///< in bytes
  bool wide;           ///< every row begins at a multiple of 8 bytes

  AK_HD const uint8_t* row(int64_t index) const {
    const int64_t last = index % inner[1], rest = index / inner[1];
    return data + rest / inner[0] * strides[0] + rest % inner[0] * strides[1] + last * strides[2];
  }
};

/// All matrices are rows x columns without gaps, columns at most 2^30; fp16, bf16 or fp32.
struct SoftmaxRows {
  const void* x;
  void* y;
  float* statistics;  // of log-softmax: base and 1 / sum of each row, [2, rows]; else null
  RowMask mask;
  DType x_type, y_type;
  int64_t rows;
  int columns;
  bool safe;
};
Status softmax_rows(const SoftmaxRows& problem, Stream stream);

struct SoftmaxGradient {
  const void *grad, *of;    // `of`: the y of softmax, the x of log-softmax
  const float* statistics;  // as above; null for softmax
  RowMask mask;             // what it leaves out has no gradient
  void* out;
  DType grad_type, of_type, out_type;
  int64_t rows;
  int columns;
};
Status softmax_rows_backward(const SoftmaxGradient& problem, Stream stream);

}  // namespace ak
