// gemm_column_sums: reduces the column sums per 16 rows that a GEMM's tiles wrote; add_slots: those that blocks wrote.
//
// Work: reads 4 bytes per 16 elements of C: bound by memory. Plan: a block takes 32 columns and each of its 8 warps
// every 8th row, with 16 rows in flight: few blocks must fetch much, 96 of them 25 MB for a C of 32,768 x 3,072. Shared
// memory combines the warps' sums. Trap: the result is a gradient and must be reproducible, so the order of additions
// may depend on the shape alone.
#include "gemm/column_sums.h"

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / kWarpThreads;
constexpr int kSumInFlight = 16;
constexpr int kSumChain = 512;  // rows that a thread adds in fp32; it adds such sums in double

AK_KERNEL(kSumThreads, 4) gemm_column_sums_kernel(const float* sums, int64_t rows, int64_t columns, float* out) {
  wait_for_previous_kernel();
  allow_next_kernel();
  auto of_warp = shared<float, kSumThreads>();
  const int lane = lane_index(), warp = warp_index();
  const int64_t x = static_cast<int64_t>(block_index()) * kWarpThreads + lane;
  double total = 0.0;
  AK_NO_UNROLL
  for (int64_t begin = warp; x < columns && begin < rows; begin += kSumChain * kSumWarps) {
    const int64_t end = begin + kSumChain * kSumWarps < rows ? begin + kSumChain * kSumWarps : rows;
    float chain = 0.0f;
    AK_NO_UNROLL
    for (int64_t first = begin; first < end; first += kSumInFlight * kSumWarps) {
      float v[kSumInFlight];
      AK_UNROLL
      for (int i = 0; i < kSumInFlight; i++) {
        const int64_t row = first + i * kSumWarps;
        v[i] = row < rows ? load(sums + row * columns + x) : 0.0f;
      }
      AK_UNROLL
      for (int i = 0; i < kSumInFlight; i++) chain += v[i];
    }
    total += chain;
  }
  float sum = static_cast<float>(total);
  of_warp[thread_index()] = sum;
  block_sync();
  if (warp != 0 || x >= columns) return;
  for (int w = 1; w < kSumWarps; w++) sum += of_warp[w * kWarpThreads + lane];
  store(out + x, sum);
}

}  // namespace

Status add_slots(const float* slots, int64_t count, int64_t columns, float* out, Stream stream) {
  const LaunchConfig config{.name = "gemm_column_sums",
                            .grid = static_cast<int>((columns + kWarpThreads - 1) / kWarpThreads),
                            .block = kSumThreads,
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_column_sums_kernel, config, slots, count, columns, out);
}

Status gemm_column_sums(const GemmProblem& q, float* out, Stream stream) {
  const int64_t columns = columns_of_c(q);
  return add_slots(q.epilogue.column_sums, column_sums_size(q) / columns, columns, out, stream);
}

}  // namespace ak
