// column_sums: the sums of a matrix's columns, the gradient of a bias.
//
// Work: reads the matrix once, two instructions an element: bound by memory. Plan: 528 blocks. A block has a strip of
// up to 256 columns and every n-th row of a share; a team of up to 32 threads, 8 columns each, has 64 bytes a thread in
// flight, 64 KB an SM. Shared memory combines a block's teams, and gemm_column_sums_kernel the shares: 2 % of the
// traffic for 32,768 x 768, within L2. Rows that are not aligned to 16 bytes are read element by element, in the same
// order of additions. Trap: the result is a gradient and must be reproducible, so teams and shares depend on the shape
// alone, neither on the GPU nor on alignment.
#include "base/row.cuh"
#include "column_sums/call.h"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "gemm/column_sums.h"

namespace ak {
namespace {

template <class T, int kVec>
AK_KERNEL(ColumnStrips::kThreads, 4)
column_sums_kernel(AK_PARAM(ColumnSums) p, AK_PARAM(ColumnStrips) strips) {
  constexpr int kColumns = ColumnStrips::kColumns, kVectors = kColumns / kVec;
  constexpr int kRows = kVec == 1 ? 1 : 64 / (kColumns * sizeof(T));  // in flight: 64 bytes a thread, or 8 elements
  wait_for_previous_kernel();
  allow_next_kernel();
  auto of_teams = shared<float, ColumnStrips::kThreads * kColumns>();
  const int lanes = strips.lanes, width = lanes * kColumns;
  const int64_t share = block_index() / strips.count, begin = block_index() % strips.count * int64_t{width};
  const int columns = static_cast<int>(p.columns - begin < width ? p.columns - begin : width);
  const int team = thread_index() / lanes, lane = thread_index() % lanes;
  if (team < strips.teams) {
    float sums[kColumns] = {};
    const int64_t step = strips.shares * strips.teams;
    const T* x = static_cast<const T*>(p.x) + begin;
    AK_NO_UNROLL
    for (int64_t first = share * strips.teams + team; first < p.rows; first += kRows * step) {
      Vec<T, kVec> v[kRows][kVectors] = {};  // 0 is added beyond the last row and column
      AK_UNROLL
      for (int i = 0; i < kRows; i++) {
        const int64_t row = first + i * step;
        AK_UNROLL
        for (int k = 0, column = lane * kVec; k < kVectors; k++, column += lanes * kVec) {
          if (row < p.rows && column < columns) v[i][k] = load_vec<kVec, Cache::kStreaming>(x + row * p.pitch + column);
        }
      }
      AK_UNROLL
      for (int i = 0; i < kRows; i++) {
        AK_UNROLL
        for (int k = 0; k < kVectors; k++) {
          const auto values = to_floats(v[i][k]);
          AK_UNROLL
          for (int j = 0; j < kVec; j++) sums[k * kVec + j] += values[j];
        }
      }
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

template <class T>
Status run_column_sums(const ColumnSums& p, Stream stream) {
  constexpr int kVec = kWord / sizeof(T);
  const ColumnStrips strips(p.rows, p.columns);
  const LaunchConfig config{.name = "column_sums",
                            .grid = static_cast<int>(strips.count * strips.shares),
                            .block = ColumnStrips::kThreads,
                            .overlap_previous = true,
                            .stream = stream};
  const bool aligned = vector_aligned(p.x) && p.pitch % kVec == 0 && p.columns % kVec == 0;
  const Status status = aligned ? launch(column_sums_kernel<T, kVec>, config, p, strips)
                                : launch(column_sums_kernel<T, 1>, config, p, strips);
  return status.ok() && strips.shares > 1 ? add_slots(p.slots, strips.shares, p.columns, p.sums, stream) : status;
}

}  // namespace

Status column_sums(const ColumnSums& p, Stream stream) {
  if (p.type == DType::kFloat32) return run_column_sums<float>(p, stream);
  return p.type == DType::kBFloat16 ? run_column_sums<bf16>(p, stream) : run_column_sums<fp16>(p, stream);
}

}  // namespace ak
