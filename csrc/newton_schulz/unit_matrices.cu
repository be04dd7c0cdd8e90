// unit_matrices: the sums of squares of all rows, then all rows divided by the norms of their matrices.
//
// Work: every element is read twice and written once in 16 bits: 6 (16-bit) or 10 bytes (fp32) an element. The second
// read begins at the end of the stack, which is still in L2. One fma of float64 an element, which is half an fp32 one
// on sm_80 and sm_90, and one multiplication. Plan: a warp per row, adjacent lanes on adjacent columns; the second
// kernel takes kRowsPerBlock rows a block, since each block first adds the sums of all rows of its matrix, 8 bytes a
// row. Trap: the order of the sums is that of newton_schulz/formula.h, whatever the batch.
#include "base/element.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "newton_schulz/call.h"
#include "newton_schulz/formula.h"

namespace ak {
namespace {

constexpr int kWarps = kUnitThreads / kWarpThreads, kRowsPerBlock = 4 * kWarps;

AK_DEVICE float element_of(const UnitMatrices& call, int64_t row_begin, int column) {
  return load_element(call.type, element(call.x, call.type, row_begin + column * call.column_stride));
}

AK_KERNEL(kUnitThreads, 4)
row_squares_kernel(AK_PARAM(UnitMatrices) call) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = static_cast<int64_t>(block_index()) * kWarps + warp_index();
  if (row >= static_cast<int64_t>(call.batch) * call.rows) return;
  const int64_t begin = row / call.rows * call.batch_stride + row % call.rows * call.row_stride;
  double sum = 0.0;
  for (int column = lane_index(); column < call.columns; column += kWarpThreads) {
    const double x = element_of(call, begin, column);
    sum += x * x;
  }
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
    for (int column = lane_index(); column < call.out_columns; column += kWarpThreads) {
      const bool inside = row < call.rows && column < call.columns;
      const float x = inside ? unit_element(element_of(call, begin, column), factor) : 0.0f;
      store(out + column, round_half(call.out_type, x));
    }
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
