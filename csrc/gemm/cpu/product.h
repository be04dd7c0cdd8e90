// The fp32 product A B of a GEMM problem, in blocks of sums that an epilogue finishes.
#pragma once

#include <cstdint>
#include <functional>

#include "gemm/call.h"
#include "gemm/cpu/kernel.h"

namespace ak {

// A block of finished sums, in the cache of the thread that gets it. The sums may be overwritten.
struct SumsBlock {
  float* sums;              // of the first row and column
  int64_t stride;           // from row to row
  int64_t half;             // from a column of the first half to its partner in the second; 0 without halves
  int64_t row, rows;        // among the rows of all batches
  int64_t column, columns;  // of a half
  int64_t unit;             // number of the first unit of kRowUnit rows
};
using Finish = std::function<void(const SumsBlock&)>;

// Blocks begin at multiples of this many rows of a matrix, the unit of sums over rows.
inline constexpr int64_t kRowUnitLog2 = 6, kRowUnit = 1 << kRowUnitLog2;

// Units of a product of this many rows.
inline int64_t row_units(int64_t batches, int64_t rows) { return batches * ((rows + kRowUnit - 1) / kRowUnit); }

// Calls `finish` for blocks that cover the product, on several threads. Forward of swiglu: a block has the same columns
// of both halves of B. `room`: fp32 memory of the product's size that may hold the sums, or null.
void product(const GemmProblem& q, float* room, const Finish& finish);

// The product without instructions of the machine's own (portable.cpp): A B, contiguous, in `sums`.
void portable_product(const GemmProblem& q, float* sums);

// A symmetric C (syrk.cpp).
void run_symmetric(const GemmProblem& q);

// ---- on the micro-kernels of an instruction set (blocked.cpp)

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

// Dot products, for problems whose small operand the blocked product would pack to use a few times.
bool is_thin(const BlockedProblem& problem);
void thin_product(const Kernel& kernel, const BlockedProblem& problem, const Finish& finish);

}  // namespace ak
