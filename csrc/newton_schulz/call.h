// unit_matrices: a stack of matrices, each divided by its Frobenius norm, in 16 bits.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

struct UnitMatrices {
  const void* x;  // [batch, rows, columns] of fp16, bf16 or fp32; strides in elements
  DType type;
  int64_t batch_stride, row_stride, column_stride;
  int batch, rows, columns;  // at least 1
  double eps;                // least norm to divide by
  double* row_sums;          // scratch: [batch, rows]
  uint16_t* out;             // [batch, out_rows, out_columns], contiguous: zeros beyond the rows and columns of x
  DType out_type;            // fp16 or bf16
  int out_rows, out_columns;
};
Status unit_matrices(const UnitMatrices& call, Stream stream);

}  // namespace ak
