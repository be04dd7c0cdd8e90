// Host side of gemm_sm80's kernels: copy paths, split of k, number of stages, arguments.
#pragma once
#include <algorithm>

#include "gemm/sm80/gemm.cuh"

namespace ak {
namespace mma_gemm {

inline Status refuse(const char* why) { return {1, why}; }

inline int ceil_div(int x, int y) { return (x + y - 1) / y; }

/// Fastest path for an operand of `rows` lines.
inline CopyPath path_of(const void* data, int64_t ld, int rows, int64_t batch_stride, int batch, int64_t second_half) {
  uint64_t distances = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(second_half * 2);
  if (rows > 1) distances |= static_cast<uint64_t>(ld * 2);
  if (batch > 1) distances |= static_cast<uint64_t>(batch_stride * 2);
  return distances % 16 == 0  ? CopyPath::k16Bytes
         : distances % 8 == 0 ? CopyPath::k8Bytes
         : distances % 4 == 0 ? CopyPath::k4Bytes
                              : CopyPath::kShifted;
}
inline int rows_of_a(const GemmProblem& q) { return q.m_major_a ? q.k : q.m; }
inline int rows_of_b(const GemmProblem& q) { return q.n_major_b ? q.k : q.n; }

/// k per split: a multiple of a step; useful_splits() drops empty splits.
inline int k_per_split(int k, int splits) { return ceil_div(ceil_div(k, kBlockK), splits) * kBlockK; }
inline int useful_splits(int k, int splits) { return ceil_div(k, k_per_split(k, splits)); }

struct TileSize {
  int m, n;
};
inline TileSize size_of(GemmSm80Tile tile) {
  switch (tile) {
    case GemmSm80Tile::k128x256:
      return {128, 256};
    case GemmSm80Tile::k128x128:
      return {128, 128};
    case GemmSm80Tile::k64x64:
      break;
  }
  return {64, 64};
}
inline int64_t tiles_of(const GemmProblem& q, TileSize size) {
  const int columns = is_halved(q) ? ceil_div(q.n / 2, size.n / 2) : ceil_div(q.n, size.n);
  if (q.symmetric) return q.batch * triangle_of(columns);
  return static_cast<int64_t>(q.batch) * ceil_div(q.m, size.m) * columns;
}

/// Largest number of stages that keeps the tile's number of blocks per SM; at least one block must fit.
template <class Tile>
int stages_for(int stage_bytes) {
  const int share = shared_share(Tile::kBlocks);
  for (int stages = kMaxStages; stages >= kMinStages; stages--) {
    if (stages * stage_bytes <= share) return stages;
  }
  return kMaxStages * stage_bytes <= device_shared_limit() ? kMaxStages : kMinStages;
}

template <class Tile>
int stage_bytes(const Args& args) {
  return Tile::kBlockM * strip_pitch(args.a.path) + Tile::kBlockN * strip_pitch(args.b.path);
}

/// Without scratch.
template <class Tile>
Args arguments(const GemmProblem& q, int splits) {
  const bool halved = is_halved(q);
  Args args{};
  args.finish = {q.epilogue, q.c, q.m, q.n, is_plain(q.epilogue)};
  if (q.accumulate) {
    args.finish.epilogue.residual = q.c;
    args.finish.epilogue.beta = 1.0f;
    args.finish.plain = false;
  }
  args.k = q.k;
  args.columns = columns_of_sums(q);
  args.second_half = halved ? q.n / 2 : Tile::kBlockN / 2;
  args.tile_columns = halved ? Tile::kBlockN / 2 : Tile::kBlockN;
  // The stride of a single row may be anything, but even a copy of 0 bytes needs an aligned address.
  const int64_t ld_a = rows_of_a(q) > 1 ? q.ld_a : 0, ld_b = rows_of_b(q) > 1 ? q.ld_b : 0;
  args.a = operand_args(q.a, ld_a, q.batch_stride_a, q.m_major_a ? Major::kMN : Major::kK, gemm_sm80_path_a(q),
                        Tile::kBlockM, Tile::kBlockM / 2, Tile::kThreads);
  args.b = operand_args(q.b, ld_b, q.batch_stride_b, q.n_major_b ? Major::kMN : Major::kK, gemm_sm80_path_b(q),
                        Tile::kBlockN, args.second_half, Tile::kThreads);
  args.splits = splits;
  args.k_per_split = k_per_split(q.k, splits);
  const int size = bytes_of(q.c.type);
  const auto wide = [&](int64_t stride) { return stride * size % 16 == 0; };
  args.wide_c = q.c.column_stride == 1 && reinterpret_cast<uintptr_t>(q.c.data) % 16 == 0 &&
                (q.m == 1 || wide(q.c.row_stride)) && (q.batch == 1 || wide(q.c.batch_stride));

  args.stages = stages_for<Tile>(stage_bytes<Tile>(args));
  return args;
}

template <class Tile>
size_t shared_bytes(const Args& args) {
  constexpr int kOutputBytes = Tile::kThreads / kWarpThreads * Output<Tile>::kBytes;
  return static_cast<size_t>(std::max(args.stages * stage_bytes<Tile>(args), kOutputBytes));
}

}  // namespace mma_gemm
}  // namespace ak
