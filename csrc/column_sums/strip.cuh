// The block of a grid that sums the columns of a matrix while it reads or makes the elements.
#pragma once
#include "base/row.cuh"
#include "column_sums/call.h"
#include "device/block.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "gemm/column_sums.h"

namespace ak {

/// Adds the columns of the block's strip over its share of the rows and stores them in p.sums, or in its part of
/// p.slots, which add_slots adds. The order of additions depends on the shape alone, neither on kVec nor on kRows.
///
/// load(at) returns the Operands of the kVec elements from `at` on, an offset into the matrix, and finish(operands, at,
/// inside) their Vec<T, kVec>. A team loads kRows rows before it finishes them. Out of bounds, where `inside` is false,
/// operands are zeros, of which finish() makes zeros.
template <class Operands, int kVec, int kRows, class Load, class Finish>
AK_DEVICE void sum_strip(const ColumnSums& p, const ColumnStrips& strips, Load load, Finish finish) {
  constexpr int kColumns = ColumnStrips::kColumns, kVectors = kColumns / kVec;
  auto of_teams = shared<float, ColumnStrips::kThreads * kColumns>();
  const int lanes = strips.lanes, width = lanes * kColumns;
  const int64_t share = block_index() / strips.count, begin = block_index() % strips.count * int64_t{width};
  const int columns = static_cast<int>(p.columns - begin < width ? p.columns - begin : width);
  const int team = thread_index() / lanes, lane = thread_index() % lanes;
  if (team < strips.teams) {
    float sums[kColumns] = {};
    const int64_t first = share * strips.teams + team, step = strips.shares * strips.teams, stride = step * p.pitch;
    int64_t at = begin + first * p.pitch;
    AK_NO_UNROLL
    for (int64_t row = first; row < p.rows; row += kRows * step, at += kRows * stride) {
      Operands operands[kRows][kVectors] = {};
      const auto each = [&](auto f) {
        AK_UNROLL
        for (int i = 0; i < kRows; i++) {
          AK_UNROLL
          for (int k = 0, column = lane * kVec; k < kVectors; k++, column += lanes * kVec) {
            const bool inside = row + i * step < p.rows && column < columns;
            f(operands[i][k], at + i * stride + column, inside, k * kVec);
          }
        }
      };
      each([&](Operands& v, int64_t from, bool inside, int) {
        if (inside) v = load(from);
      });
      each([&](const Operands& v, int64_t to, bool inside, int held) {
        const auto values = to_floats(finish(v, to, inside));
        AK_UNROLL
        for (int j = 0; j < kVec; j++) sums[held + j] += values[j];
      });
    }
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) of_teams[team * width + (j / kVec * lanes + lane) * kVec + j % kVec] = sums[j];
  }
  block_sync();
  const int column = thread_index();
  if (column >= columns) return;
  float sum = of_teams[column];
  for (int t = 1; t < strips.teams; t++) sum += of_teams[t * width + column];
  store((strips.shares == 1 ? p.sums : p.slots + share * p.columns) + begin + column, sum);
}

/// Launches kernel(call, strips), whose blocks run sum_strip() on `sums` after wait_for_previous_kernel(), and adds the
/// slots.
template <class Kernel, class Call>
Status launch_strips(const char* name, Kernel kernel, const Call& call, const ColumnSums& sums, Stream stream) {
  const ColumnStrips strips(sums.rows, sums.columns);
  const LaunchConfig config{.name = name,
                            .grid = static_cast<int>(strips.count * strips.shares),
                            .block = ColumnStrips::kThreads,
                            .overlap_previous = true,
                            .stream = stream};
  const Status status = launch(kernel, config, call, strips);
  return status.ok() && strips.shares > 1 ? add_slots(sums.slots, strips.shares, sums.columns, sums.sums, stream)
                                          : status;
}

}  // namespace ak
