// syrk on the CPU: the lower triangle of alpha a b^T + beta c + diagonal I, and its mirror image.
//
// Work: n (n + w) k flops, w the width of a panel. A panel of columns is one product (product.h) with the rows from its
// first column down, whose sums are finished in the cache up to the diagonal. The upper triangle is copied last, from
// results that lie in the L2 or L3 cache, 2 n^2 bytes.
#include <algorithm>
#include <optional>

#include "base/check.h"
#include "base/cpu/empty.h"
#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gemm/cpu/product.h"

namespace ak {
namespace {

// A panel has at least so many columns, and a matrix about so many panels: 1/16 more than half of a full product.
constexpr int64_t kLeastColumns = 64, kPanels = 8;
// Rows and columns of a block that is copied at once: 2 x 2 KB.
constexpr int64_t kMirrored = 32;
// Elements that a thread should have to copy before a second one is woken.
constexpr int64_t kElementsPerThread = 65536;

struct Result {
  float alpha, beta, diagonal;
  const void* c;  // contiguous, or null
  void* out;      // contiguous
  DType type;
  int64_t n;

  // Row `row` of a matrix that begins at element `matrix`, from `column` on.
  AK_SIMD_INLINE void finish_row(float* sums, int64_t matrix, int64_t row, int64_t column, int64_t width) const {
    const int64_t at = matrix + row * n + column;
    float buffer[kTile];
    for (int64_t i = 0; i < width; ++i) sums[i] = alpha * sums[i];
    if (c) {
      const float* addend = load_span(c, type, at, width, buffer);
#pragma GCC ivdep
      for (int64_t i = 0; i < width; ++i) sums[i] = fma(beta, addend[i], sums[i]);
    }
    if (column <= row && row < column + width) sums[row - column] += diagonal;
    store_span(sums, out, type, at, width);
  }
};

// The sums of the panel at column `first` of every matrix: of its `rows` rows from the diagonal down.
AK_SIMD_CLONES void finish(const Result& result, const SumsBlock& block, int64_t first, int64_t rows) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t matrix = (block.row + i) / rows * result.n * result.n, row = first + (block.row + i) % rows;
    for (int64_t x = 0; x < block.columns; x += kTile) {
      const int64_t column = first + block.column + x;
      const int64_t width = std::min({kTile, block.columns - x, row + 1 - column});
      if (width > 0) result.finish_row(block.sums + i * block.stride + x, matrix, row, column, width);
    }
  }
}

// Copies the strict lower triangle of every matrix over the upper one.
void mirror(uint16_t* matrices, int64_t count, int64_t n) {
  const int64_t blocks = (n + kMirrored - 1) / kMirrored;
  const int64_t grain = std::max<int64_t>(1, 2 * kElementsPerThread / (n * kMirrored + 1));
  torch::stable::parallel_for(0, count * blocks, grain, [=](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      uint16_t* const s = matrices + task / blocks * n * n;
      const int64_t row0 = task % blocks * kMirrored, rows_end = std::min(n, row0 + kMirrored);
      for (int64_t column0 = 0; column0 <= row0; column0 += kMirrored) {
        const int64_t columns_end = std::min(n, column0 + kMirrored);
        for (int64_t column = column0; column < columns_end; ++column) {
          for (int64_t row = std::max(row0, column + 1); row < rows_end; ++row) s[column * n + row] = s[row * n + column];
        }
      }
    }
  });
}

Tensor syrk(const Tensor& a, const Tensor& b, std::optional<Tensor> c, double alpha, double beta, double diagonal) {
  constexpr const char* op = "syrk";
  const int64_t d = a.dim();
  AK_CHECK(d == 2 || d == 3, op, ": a must have shape (N, K) or (B, N, K); got ", Ints{a.sizes()});
  AK_CHECK(same_sizes(a, b), op, ": b must have the shape of a, ", Ints{a.sizes()}, "; got ", Ints{b.sizes()});
  check_operands(op, a, torch::stable::transpose(b, -2, -1));
  const int64_t n = a.size(d - 2), count = d == 3 ? a.size(0) : 1;
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = n;
  std::optional<Tensor> dense_c;
  if (c) {
    check_dtype(op, {"c"}, *c, {a.scalar_type()});
    AK_CHECK(c->is_cpu() && static_cast<size_t>(c->dim()) == sizes.size() &&
                 std::equal(sizes.begin(), sizes.end(), c->sizes().begin()),
             op, ": c must be a CPU tensor of shape ", Ints{sizes}, "; got ", Ints{c->sizes()});
    if (beta != 0) dense_c = torch::stable::contiguous(*c);
  }
  const Tensor out = empty_tensor(sizes, a.scalar_type());
  if (out.numel() == 0) return out;
  const Result result{static_cast<float>(alpha),
                      static_cast<float>(beta),
                      static_cast<float>(diagonal),
                      dense_c ? dense_c->const_data_ptr() : nullptr,
                      out.mutable_data_ptr(),
                      dtype_of(a.scalar_type()),
                      n};
  const auto readable = [&](const Tensor& t) {  // once, not for each panel
    return t.stride(d - 1) == 1 || t.stride(d - 2) == 1 ? t : torch::stable::contiguous(t);
  };
  const Tensor rows = readable(a), columns = readable(b);
  const int64_t units = (n + kPanels * kLeastColumns - 1) / (kPanels * kLeastColumns), width = units * kLeastColumns;
  for (int64_t first = 0; first < n; first += width) {
    Tensor below = rows, panel = columns;
    below = torch::stable::narrow(below, d - 2, first, n - first);
    panel = torch::stable::narrow(panel, d - 2, first, std::min(width, n - first));
    product(below, torch::stable::transpose(panel, -2, -1), {},
            [&](const SumsBlock& block) { finish(result, block, first, n - first); });
  }
  mirror(static_cast<uint16_t*>(out.mutable_data_ptr()), count, n);
  return out;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("syrk", TORCH_BOX(&ak::syrk)); }
