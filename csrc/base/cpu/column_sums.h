// Sums of the columns of a matrix in fp32, in the pass that makes the matrix or in one of their own.
//
// The cut of the rows into strips depends on their number alone; a strip is summed row by row, then the strips in
// order: the same bits for any number of threads and every instruction set. No chain of fp32 additions is longer than
// kChain, so the error does not grow with the number of rows.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/cpu/tile.h"

namespace ak {

// sums[c] += column c of a dense matrix of fp16, bf16 or fp32, [rows, width], row by row.
void add_rows(const void* matrix, DType dtype, int64_t rows, int64_t width, float* sums);

// totals += sums; sums = 0.
void move_sums(float* sums, double* totals, int64_t width);

inline constexpr int64_t kChain = 512;  // fp32 additions one after the other

// sums = those of the rows begin to end, which add(begin, end, sums) adds to `sums`, `additions` to each for a row:
// at most kChain in fp32, and what they make in double.
template <typename Rows>
void sum_rows(int64_t begin, int64_t end, int64_t width, float* sums, const Rows& add, int64_t additions = 1) {
  const int64_t most = std::max<int64_t>(1, kChain / additions);
  std::fill_n(sums, width, 0.0f);
  if (end - begin <= most) return add(begin, end, sums);
  std::vector<double> totals(static_cast<size_t>(width), 0.0);
  for (; begin < end; begin += most) {
    add(begin, std::min(end, begin + most), sums);
    move_sums(sums, totals.data(), width);
  }
  std::copy_n(totals.data(), width, sums);
}

// The sums of a matrix whose rows begin to end are added to the sums of their strip by add(begin, end, sums), which
// several threads call and which must not throw. `additions`: as in sum_rows.
template <typename Rows>
void sum_columns(int64_t rows, int64_t width, float* sums, const Rows& add, int64_t additions = 1) {
  constexpr int64_t kStrips = 64, kLeastRows = 4, kGrain = 32768;  // elements that are worth a thread
  const int64_t strip = std::max(kLeastRows, (rows + kStrips - 1) / kStrips), strips = (rows + strip - 1) / strip;
  std::vector<float> partial(static_cast<size_t>(strips * width));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, strip * width));
  torch::stable::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      sum_rows(i * strip, std::min(rows, (i + 1) * strip), width, partial.data() + i * width, add, additions);
  });
  std::fill_n(sums, width, 0.0f);
  add_rows(partial.data(), DType::kFloat32, strips, width, sums);
}

}  // namespace ak
