// The product on one instruction set's micro-kernels: block by block (gemm_blocked.cpp), or by dot products where that
// would pack a matrix to use it a few times (gemm_thin.cpp).
#pragma once

#include "gemm/cpu/kernel.h"
#include "gemm/cpu/product.h"

namespace ak {

struct BatchedOperand {
  Operand matrix;  // the first
  int64_t batch_stride;

  Operand of(int64_t batch) const { return {matrix.data + batch * batch_stride, matrix.lane_stride, matrix.k_stride}; }
};

struct BlockedProblem {
  BatchedOperand a, b;
  int64_t batches, m, n, k;
  int64_t halves;  // 2: the columns of b are two halves of which a block takes the same part
};

void blocked_product(const Kernel& kernel, const BlockedProblem& problem, const Finish& finish);

bool is_thin(const BlockedProblem& problem);
void thin_product(const Kernel& kernel, const BlockedProblem& problem, const Finish& finish);

}  // namespace ak
