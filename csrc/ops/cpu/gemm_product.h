// What the GEMM ops of the CPU share: checks of the operands, and the product a @ b in fp32.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/check.h"

namespace ak {

void check_operands(const char* op, const Tensor& a, const Tensor& b);

// fp16, bf16 or fp32, or by default the dtype of a.
ScalarType output_dtype(const char* op, const Tensor& a, std::optional<ScalarType> out_dtype);

// The sizes of a @ b.
std::vector<int64_t> product_sizes(const Tensor& a, const Tensor& b);

// a @ b in fp32, contiguous, in memory that nothing else refers to. `batch_invariant`: the bits of a row depend on
// nothing but that row and b.
Tensor product(const Tensor& a, const Tensor& b, bool batch_invariant);

// A contiguous fp32 copy of a 16-bit tensor, or the tensor itself where it is one.
Tensor contiguous_float(const Tensor& t);

// How many rows of n elements make a piece of work worth a thread.
inline int64_t rows_per_thread(int64_t n) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n)); }

}  // namespace ak
