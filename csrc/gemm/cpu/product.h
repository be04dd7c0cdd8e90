// What the GEMM ops of the CPU share: checks of the operands, and the product a @ b in fp32.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/cpu/empty.h"
#include "base/cpu/isa.h"
#include "gemm/cpu/kernel.h"

namespace ak {

struct BlockedProblem;  // gemm_blocked.h

void check_operands(const char* op, const Tensor& a, const Tensor& b);

// fp16, bf16 or fp32, or by default the dtype of a.
ScalarType output_dtype(const char* op, const Tensor& a, std::optional<ScalarType> out_dtype);

// The sizes of a @ b.
std::vector<int64_t> product_sizes(const Tensor& a, const Tensor& b);

// A block of finished sums, in the cache of the thread that gets it. The sums may be overwritten.
struct SumsBlock {
  float* sums;        // of the first row and column
  int64_t stride;     // from row to row
  int64_t half;       // from a column of the first half to its partner in the second; 0 where columns are not halved
  int64_t row, rows;  // among the rows of all batches
  int64_t column, columns;  // of a half
  int64_t unit;             // kRowUnit rows are one unit of a sum over rows: the number of the first
};
using Finish = std::function<void(const SumsBlock&)>;

// No block cuts through this many rows from its first row on.
inline constexpr int64_t kRowUnitLog2 = 6, kRowUnit = 1 << kRowUnitLog2;

// At least as many units as the blocks of a product of this many rows have.
int64_t row_units(int64_t batches, int64_t rows);

struct ProductOptions {
  bool batch_invariant = false;  // the bits of a row depend on nothing but that row and b
  bool halves = false;           // a block takes the same columns of both halves of b
  const Tensor* room = nullptr;  // a contiguous fp32 tensor of the product's size, where the sums may be kept
};

// a @ b in fp32. `finish` is called for blocks that cover the product, by several threads.
void product(const Tensor& a, const Tensor& b, const ProductOptions& options, const Finish& finish);
// The same of operands as the kernels of `isa` take them, which is not the portable path.
void product(Isa isa, bool is_bf16, const BlockedProblem& problem, const Finish& finish);
Operand operand_of(const void* data, int64_t lanes, int64_t lane_stride, int64_t k, int64_t k_stride);

// The elements of a 16-bit or fp32 tensor as contiguous floats: its own memory where it is that. ATen would convert
// them in two calls of its dispatcher, which cost a small product as much as its sums.
class Floats {
 public:
  explicit Floats(const Tensor& t);
  Floats(const void* data, DType dtype, int64_t n) { load(data, dtype, n); }
  const float* data() const { return data_; }

 private:
  void load(const void* data, DType dtype, int64_t n);

  std::optional<Tensor> dense_;
  std::vector<float> widened_;
  const float* data_;
};

}  // namespace ak
