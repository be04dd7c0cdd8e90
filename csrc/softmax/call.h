// The calls of softmax and log-softmax of rows, with a mask, and of their gradients.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// The elements that count (a byte that is not 0); all of them if data is null. The rows of the matrix are numbered
/// through three dimensions, along each of which the mask may be broadcast: its stride is then 0.
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

inline constexpr int64_t kMaxSoftmaxColumns = int64_t{1} << 30;

/// All matrices are dense, [rows, columns], fp16, bf16 or fp32, with at most kMaxSoftmaxColumns.
struct SoftmaxRows {
  const void* x;
  void* y;
  float* statistics;  // log-softmax: base and 1 / sum of each row, [2, rows]; softmax: null
  RowMask mask;
  DType x_type, y_type;
  int64_t rows;
  int columns;
  bool safe;
};
Status softmax_rows(const SoftmaxRows& call, Stream stream);

struct SoftmaxRowsBackward {
  const void *grad, *of;    // `of`: the y of softmax, the x of log-softmax
  const float* statistics;  // as above; null for softmax
  RowMask mask;             // masked elements have no gradient
  void* out;
  DType grad_type, of_type, out_type;
  int64_t rows;
  int columns;
};
Status softmax_rows_backward(const SoftmaxRowsBackward& call, Stream stream);

}  // namespace ak
