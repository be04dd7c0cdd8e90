// Final reduction of a GEMM that also sums the columns of its result.
#pragma once
#include <algorithm>

#include "gemm/call.h"

namespace ak {

/// Floats of GemmEpilogue::column_sums: a row of C's width per group of 16 rows on a GPU; fewer on the CPU.
inline int64_t column_sums_size(const GemmProblem& q) {
  return static_cast<int64_t>(q.batch) * ((q.m + 15) / 16) * columns_of_c(q);
}
/// out[columns_of_c(problem)] = column sums of C over rows and batch, from the sums of groups of
/// rows in problem.epilogue.column_sums. The order of additions depends on the shape alone.
Status gemm_column_sums(const GemmProblem& problem, float* out, Stream stream);

/// Rows that a thread adds in fp32, one after the other. More rows take more blocks, so that the error of their sums
/// does not grow with their number.
inline constexpr int64_t kMostChain = 1024;
/// Blocks that share `rows`, each a thread's chain, if `resident` of them fit the chip.
inline int64_t blocks_of_rows(int64_t rows, int64_t resident) {
  return std::min(rows, std::max(resident, (rows - 1) / kMostChain + 1));
}

/// out[c] = the sum of slots[i][c] over the slots, each a row of `columns` sums.
Status add_slots(const float* slots, int64_t count, int64_t columns, float* out, Stream stream);

}  // namespace ak
