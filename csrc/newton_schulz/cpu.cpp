// unit_matrices on the CPU: two passes over a matrix, row by row.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "newton_schulz/call.h"
#include "newton_schulz/formula.h"

namespace ak {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kElementsPerThread = 65536;

// The sum of 2^n values as lanes of a warp add it.
AK_SIMD_INLINE double tree_sum(double* values, int count) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

AK_SIMD_CLONES double sum_of_squares(const float* x, int64_t n) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double v = x[i + lane];
      lanes[lane] += v * v;
    }
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return tree_sum(lanes, kLanes);
}

AK_SIMD_CLONES void scale_row(const float* x, double factor, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = unit_element(x[i], factor);
}

double sum_of_rows(const double* sums, int rows) {
  double threads[kUnitThreads] = {}, total = 0.0;
  for (int row = 0; row < rows; ++row) threads[row % kUnitThreads] += sums[row];
  for (int warp = 0; warp < kUnitThreads; warp += kLanes) {
    const double of_warp = tree_sum(threads + warp, kLanes);
    total = warp == 0 ? of_warp : total + of_warp;
  }
  return total;
}

// Row `row` as floats.
const float* row_of(const UnitMatrices& call, int64_t batch, int64_t row, float* buffer) {
  const int64_t at = batch * call.batch_stride + row * call.row_stride;
  if (call.column_stride == 1) return load_tile(call.x, call.type, at, call.columns, buffer);
  with_narrow_dtype(call.type, [&]<typename T>(T) {
    const T* x = static_cast<const T*>(call.x) + at;
    for (int64_t i = 0; i < call.columns; ++i) buffer[i] = to_float(x[i * call.column_stride]);
  });
  return buffer;
}

}  // namespace

Status unit_matrices(const UnitMatrices& call, Stream) {
  const int64_t rows = static_cast<int64_t>(call.batch) * call.rows;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / call.columns);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(call.columns));
    for (int64_t i = begin; i < end; ++i)
      call.row_sums[i] = sum_of_squares(row_of(call, i / call.rows, i % call.rows, buffer.data()), call.columns);
  });
  std::vector<double> factors(static_cast<size_t>(call.batch));
  for (int64_t i = 0; i < call.batch; ++i)
    factors[static_cast<size_t>(i)] = unit_factor(sum_of_rows(call.row_sums + i * call.rows, call.rows), call.eps);
  torch::stable::parallel_for(
      0, static_cast<int64_t>(call.batch) * call.out_rows, grain, [&](int64_t begin, int64_t end) {
        std::vector<float> buffer(static_cast<size_t>(call.columns)), scaled(static_cast<size_t>(call.out_columns));
        for (int64_t i = begin; i < end; ++i) {
          const int64_t batch = i / call.out_rows, row = i % call.out_rows;
          uint16_t* const out = call.out + i * call.out_columns;
          if (row >= call.rows) {
            std::fill_n(out, call.out_columns, uint16_t{0});
            continue;
          }
          scale_row(row_of(call, batch, row, buffer.data()), factors[static_cast<size_t>(batch)], scaled.data(),
                    call.columns);
          store_tile(scaled.data(), out, call.out_type, 0, call.out_columns);
        }
      });
  return {};
}

}  // namespace ak
