// Sums of the columns of a matrix in fp32, in the pass that makes the matrix or in one of their own.
//
// The cut of the rows into strips depends on their number alone; a strip is summed row by row, then the strips in
// order: the same bits for any number of threads and every instruction set.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/cpu/tile.h"

namespace ak {

// sums[c] += column c of a dense matrix of fp16, bf16 or fp32, [rows, width], row by row.
void add_rows(const void* matrix, DType dtype, int64_t rows, int64_t width, float* sums);

// The sums of a matrix whose rows begin to end are added to the sums of their strip by add(begin, end, sums), which
// several threads call and which must not throw.
template <typename Rows>
void sum_columns(int64_t rows, int64_t width, float* sums, const Rows& add) {
  constexpr int64_t kStrips = 64, kLeastRows = 4, kGrain = 32768;  // elements that are worth a thread
  const int64_t strip = std::max(kLeastRows, (rows + kStrips - 1) / kStrips), strips = (rows + strip - 1) / strip;
  std::vector<float> partial(static_cast<size_t>(strips * width));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, strip * width));
  torch::stable::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) add(i * strip, std::min(rows, (i + 1) * strip), partial.data() + i * width);
  });
  std::fill_n(sums, width, 0.0f);
  add_rows(partial.data(), DType::kFloat32, strips, width, sums);
}

}  // namespace ak
