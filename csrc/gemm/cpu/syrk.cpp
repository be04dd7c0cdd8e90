// A symmetric C on the CPU: the lower triangle of alpha (A B) + beta residual + diagonal I, and its mirror image.
//
// Work: n (n + w) k flops, w the width of a panel. A panel of columns is one product (product.h) with the rows from its
// first column down, whose sums are finished in the cache up to the diagonal. The upper triangle is copied last, from
// results that are in the L2 or L3 cache, 2 n^2 bytes.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

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
// Flops that a thread should have to do.
constexpr int64_t kFlopsPerThread = 4 << 20;

struct Result {
  float alpha, beta, diagonal;
  const void* residual;  // contiguous, or null
  void* out;             // contiguous
  DType type;
  int64_t n;

  // Row `row` of a matrix that begins at element `matrix`, from `column` on.
  AK_SIMD_INLINE void finish_row(float* sums, int64_t matrix, int64_t row, int64_t column, int64_t width) const {
    const int64_t at = matrix + row * n + column;
    float buffer[kTile];
    for (int64_t i = 0; i < width; ++i) sums[i] = alpha * sums[i];
    if (residual) {
      const float* addend = load_span(residual, type, at, width, buffer);
#pragma GCC ivdep
      for (int64_t i = 0; i < width; ++i) sums[i] = fma(beta, addend[i], sums[i]);
    }
    if (column <= row && row < column + width) sums[row - column] += diagonal;
    store_span(sums, out, type, at, width);
  }
};

// The sums of the panel at column `first` of matrix `from` and of those after it: of its `rows` rows from the diagonal
// down.
AK_SIMD_CLONES void finish(const Result& result, const SumsBlock& block, int64_t from, int64_t first, int64_t rows) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t matrix = (from + (block.row + i) / rows) * result.n * result.n, row = first + (block.row + i) % rows;
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
          for (int64_t row = std::max(row0, column + 1); row < rows_end; ++row)
            s[column * n + row] = s[row * n + column];
        }
      }
    }
  });
}

// The operand, `offset` elements on, from line `first` of the dimension on that is not summed over.
const void* from_line(const void* data, int64_t ld, bool k_contiguous, int64_t first, int64_t offset) {
  return static_cast<const uint16_t*>(data) + offset + first * (k_contiguous ? ld : 1);
}

}  // namespace

void run_symmetric(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  const int64_t n = q.n;
  const Result result{e.alpha, e.beta, e.diagonal, e.residual.data, q.c.data, q.type, n};
  const int64_t width = (n + kPanels * kLeastColumns - 1) / (kPanels * kLeastColumns) * kLeastColumns;
  const int64_t panels = (n + width - 1) / width, tasks = q.batch * panels;
  const auto run_panel = [&](int64_t from, int batch, int64_t index) {
    const int64_t first = index * width;
    GemmProblem panel = q;
    panel.a = from_line(q.a, q.ld_a, !q.m_major_a, first, from * q.batch_stride_a);
    panel.b = from_line(q.b, q.ld_b, !q.n_major_b, first, from * q.batch_stride_b);
    panel.batch = batch;
    panel.m = static_cast<int>(n - first);
    panel.n = static_cast<int>(std::min(width, n - first));
    product(panel, nullptr, [&](const SumsBlock& block) { finish(result, block, from, first, n - first); });
  };
  if (tasks >= 2 * torch::stable::get_num_threads()) {
    // Each thread takes panels by itself, long and short ones in turn: one region of threads instead of one a panel.
    const int64_t flops = q.batch * n * n * std::max<int64_t>(1, q.k);
    torch::stable::parallel_for(0, tasks, std::max<int64_t>(1, tasks * kFlopsPerThread / flops),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t task = begin; task < end; ++task) {
                                    const int64_t i = task % panels;
                                    run_panel(task / panels, 1, i % 2 == 0 ? i / 2 : panels - 1 - i / 2);
                                  }
                                });
  } else {
    for (int64_t index = 0; index < panels; ++index) run_panel(0, q.batch, index);
  }
  mirror(static_cast<uint16_t*>(q.c.data), q.batch, n);
}

}  // namespace ak
