// gemm_add_phases: sums the results of a product's phases (phases.h).
//
// Work: per element of C, reads 4 bytes per phase and writes the element; the remaining lines of A and B, at most
// eight, come from the cache. Bound by memory, or by its latency for the small C of a long k. Plan: a warp makes 32
// columns of four rows and issues all loads before the first sum. Traps: the sums of a phase are only 4-byte aligned.
// Elements of a phase outside C may be anything, including NaN.
#include "gemm/phases.h"

#include "base/element.cuh"
#include "device/block.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace ak {
namespace {

constexpr int kAddThreads = 256;
constexpr int kRowsOfThread = 4;
constexpr int kRowsOfBlock = kAddThreads / kWarpThreads * kRowsOfThread;
constexpr int kMostLines = 8;  // remaining lines, at most one per phase

template <class T>
struct AddPhasesArgs {
  const float* parts;
  int64_t pitch, next_phase;  // strides between rows of a phase, and between an element's phases
  const T *a, *b;             // first remaining line
  int64_t ld_a, ld_b;
  int lines;  // remaining
  int m, n;
  int blocks_across;
  float alpha;
  bool accumulate;
  GemmValues c;
};

template <class T, int kPhases>
AK_KERNEL(kAddThreads, 4)
gemm_add_phases_kernel(AK_PARAM(AddPhasesArgs<T>) args) {
  static_assert(kMostLines * kRowsOfThread == kWarpThreads, "one lane per remaining line and row");
  const int down = block_index() / args.blocks_across, across = block_index() - down * args.blocks_across;
  const int first = down * kRowsOfBlock + warp_index() * kRowsOfThread, column = across * kWarpThreads + lane_index();
  if (first >= args.m) return;
  // Out of bounds, the last row or column is repeated and not stored.
  const auto row = [&](int r) { return first + r < args.m ? first + r : args.m - 1; };
  const int x = column < args.n ? column : args.n - 1;
  float part[kRowsOfThread][kPhases], b[kMostLines];
  AK_UNROLL
  for (int r = 0; r < kRowsOfThread; r++) {
    const float* from = opaque(args.parts + row(r) * args.pitch + x);
    AK_UNROLL
    for (int i = 0; i < kPhases; i++, from += args.next_phase) part[r][i] = load<Cache::kStreaming>(from);
  }
  AK_UNROLL
  for (int i = 0; i < kMostLines; i++) {
    b[i] = i < args.lines ? to_float(load(args.b + i * args.ld_b + x)) : 0.0f;
  }
  // Each lane loads one element of A's lines; all lanes need all of them.
  const int line = lane_index() / kRowsOfThread;
  const float a =
      line < args.lines ? to_float(load(args.a + line * args.ld_a + row(lane_index() % kRowsOfThread))) : 0.0f;
  AK_UNROLL
  for (int r = 0; r < kRowsOfThread; r++) {
    float sum = 0.0f;
    AK_UNROLL
    for (int i = 0; i < kPhases; i++) sum += part[r][i];
    AK_UNROLL
    for (int i = 0; i < kMostLines; i++) sum = fma(shuffle(a, i * kRowsOfThread + r), b[i], sum);
    const int64_t at = row(r) * args.c.row_stride + column * args.c.column_stride;
    if (first + r >= args.m || column >= args.n) continue;
    uint8_t* const to = element(args.c.data, args.c.type, at);
    const float result = sum * args.alpha;
    store_element(args.c.type, to, args.accumulate ? load(reinterpret_cast<const float*>(to)) + result : result);
  }
}

}  // namespace

template <class T>
Status gemm_add_phases(const GemmProblem& q, const GemmPhases& phases, const float* parts, Stream stream) {
  const int64_t pitch = phases.columns(q.n), multiplied = int64_t{phases.lines(q.k)} * phases.count;
  const auto left = [&](const void* lines, int64_t ld) { return static_cast<const T*>(lines) + multiplied * ld; };
  const int across = (q.n + kWarpThreads - 1) / kWarpThreads;
  const int64_t blocks = int64_t{across} * ((q.m + kRowsOfBlock - 1) / kRowsOfBlock);
  if (blocks > INT32_MAX) return {1, "gemm_add_phases: more than 2^31 - 1 blocks"};
  const AddPhasesArgs<T> args{parts,
                              pitch,
                              phases.rows(q.m) * pitch + phases.a * pitch + phases.b,
                              left(q.a, q.ld_a),
                              left(q.b, q.ld_b),
                              q.ld_a,
                              q.ld_b,
                              static_cast<int>(q.k - multiplied),
                              q.m,
                              q.n,
                              across,
                              q.epilogue.alpha,
                              q.accumulate,
                              q.c};
  const LaunchConfig config{
      .name = "gemm_add_phases", .grid = static_cast<int>(blocks), .block = kAddThreads, .stream = stream};
  switch (phases.count) {
    case 2:
      return launch(gemm_add_phases_kernel<T, 2>, config, args);
    case 4:
      return launch(gemm_add_phases_kernel<T, 4>, config, args);
    default:
      return launch(gemm_add_phases_kernel<T, 8>, config, args);
  }
}

template Status gemm_add_phases<fp16>(const GemmProblem&, const GemmPhases&, const float*, Stream);
template Status gemm_add_phases<bf16>(const GemmProblem&, const GemmPhases&, const float*, Stream);

}  // namespace ak
