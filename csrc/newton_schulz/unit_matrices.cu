// unit_matrices: the sums of squares of all rows, then all rows divided by the norms of their matrices.
//
// Work: every element is read twice and written once in 16 bits: 6 (16-bit) or 10 bytes (fp32) an element. The second
// read begins at the end of the stack, which is still in L2. One fma of float64 an element, which is half an fp32 one
// on sm_80 and sm_90, and one multiplication. Plan: a warp per row, adjacent lanes on adjacent columns, 32 bytes
// of each in flight, 32 KB an SM. The second kernel takes kRowsPerBlock rows a block, since each
// block first adds the sums of all rows of its matrix, 8 bytes a row. Trap: the order of the sums is that of
// newton_schulz/formula.h, whatever the batch.
#include <bit>
#include <type_traits>

#include "base/element.cuh"
#include "base/row.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "newton_schulz/call.h"
#include "newton_schulz/formula.h"

namespace ak {
namespace {

constexpr int kWarps = kUnitThreads / kWarpThreads, kRowsPerBlock = 4 * kWarps;

/// Calls f(column, x) with a lane's elements of a row in order, up to column `columns` at least: `left` of the row,
/// then zeros. 32 bytes of them are on their way at a time, in a word each: halves that share one would wait for each
/// other.
template <class T, class F>
AK_DEVICE void for_each_element(const UnitMatrices& call, int64_t row_begin, int left, int columns, F f) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int kAhead = 32 / sizeof(T);
  const Bits* from = static_cast<const Bits*>(call.x) + row_begin + lane_index() * call.column_stride;
  const int64_t step = kWarpThreads * call.column_stride;
  AK_NO_UNROLL
  for (int first = lane_index(); first < columns; first += kAhead * kWarpThreads) {
    uint32_t x[kAhead] = {};
    AK_UNROLL
    for (int i = 0; i < kAhead; i++, from += step) {
      if (first + i * kWarpThreads < left) x[i] = load(from);
    }
    AK_UNROLL
    for (int i = 0; i < kAhead; i++) f(first + i * kWarpThreads, to_float(std::bit_cast<T>(static_cast<Bits>(x[i]))));
  }
}

AK_KERNEL(kUnitThreads, 4)
row_squares_kernel(AK_PARAM(UnitMatrices) call) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = static_cast<int64_t>(block_index()) * kWarps + warp_index();
  if (row >= static_cast<int64_t>(call.batch) * call.rows) return;
  const int64_t begin = row / call.rows * call.batch_stride + row % call.rows * call.row_stride;
  double sum = 0.0;
  with_row_dtype(call.type, [&]<class T>(T) {
    for_each_element<T>(call, begin, call.columns, call.columns, [&](int, double x) { sum += x * x; });
  });
  sum = warp_sum(sum);
  if (lane_index() == 0) store(call.row_sums + row, sum);
}

AK_KERNEL(kUnitThreads, 4)
scale_rows_kernel(AK_PARAM(UnitMatrices) call) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int blocks = (call.out_rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const int strip = grid_blocks() - 1 - block_index();
  const int64_t batch = strip / blocks;
  double sum = 0.0;
  for (int row = thread_index(); row < call.rows; row += kUnitThreads)
    sum += load(call.row_sums + batch * call.rows + row);
  const double factor = unit_factor(block_sum<kUnitThreads>(sum), call.eps);
  for (int i = 0; i < kRowsPerBlock / kWarps; i++) {
    const int row = strip % blocks * kRowsPerBlock + i * kWarps + warp_index();
    if (row >= call.out_rows) return;
    const int64_t begin = batch * call.batch_stride + row * call.row_stride;
    uint16_t* const out = call.out + (batch * call.out_rows + row) * call.out_columns;
    const int left = row < call.rows ? call.columns : 0;
    with_row_dtype(call.type, [&]<class T>(T) {
      for_each_element<T>(call, begin, left, call.out_columns, [&](int column, float x) {
        const float unit = column < left ? unit_element(x, factor) : 0.0f;  // also where the factor is NaN
        if (column < call.out_columns) store(out + column, round_half(call.out_type, unit));
      });
    });
  }
}

}  // namespace

Status unit_matrices(const UnitMatrices& call, Stream stream) {
  const int64_t rows = static_cast<int64_t>(call.batch) * call.rows;
  const int64_t strips = static_cast<int64_t>(call.batch) * ((call.out_rows + kRowsPerBlock - 1) / kRowsPerBlock);
  if (rows > INT32_MAX) return {1, "unit_matrices: more rows than 2^31 - 1"};
  LaunchConfig config{.name = "unit_matrices",
                      .grid = static_cast<int>((rows + kWarps - 1) / kWarps),
                      .block = kUnitThreads,
                      .overlap_previous = true,
                      .stream = stream};
  const Status status = launch(row_squares_kernel, config, call);
  if (!status.ok()) return status;
  config.grid = static_cast<int>(strips);
  return launch(scale_rows_kernel, config, call);
}

}  // namespace ak
