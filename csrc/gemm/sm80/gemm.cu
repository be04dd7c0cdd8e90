// Instances of gemm_sm80 and their host side: copy paths, number of stages, split of k.
#include "gemm/sm80/gemm.h"

#include <algorithm>
#include <type_traits>

#include "gemm/sm80/gemm.cuh"

namespace ak {
namespace mma_gemm {
namespace {

Status refuse(const char* why) { return {1, why}; }

int ceil_div(int x, int y) { return (x + y - 1) / y; }

/// Fastest path for an operand of `rows` lines.
CopyPath path_of(const void* data, int64_t ld, int rows, int64_t batch_stride, int batch, int64_t second_half) {
  uint64_t distances = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(second_half * 2);
  if (rows > 1) distances |= static_cast<uint64_t>(ld * 2);
  if (batch > 1) distances |= static_cast<uint64_t>(batch_stride * 2);
  return distances % 16 == 0  ? CopyPath::k16Bytes
         : distances % 8 == 0 ? CopyPath::k8Bytes
         : distances % 4 == 0 ? CopyPath::k4Bytes
                              : CopyPath::kShifted;
}
int rows_of_a(const GemmProblem& q) { return q.m_major_a ? q.k : q.m; }
int rows_of_b(const GemmProblem& q) { return q.n_major_b ? q.k : q.n; }

/// k per split: a multiple of a step; useful_splits() drops empty splits.
int k_per_split(int k, int splits) { return ceil_div(ceil_div(k, kBlockK), splits) * kBlockK; }
int useful_splits(int k, int splits) { return ceil_div(k, k_per_split(k, splits)); }

struct TileSize {
  int m, n;
};
TileSize size_of(GemmSm80Tile tile) {
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
int64_t tiles_of(const GemmProblem& q, TileSize size) {
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

template <class T, class Tile>
Status launch_gemm(const GemmProblem& q, int splits, const GemmScratch& scratch, Stream stream) {
  const bool halved = is_halved(q);
  Args args{};
  args.finish = {q.epilogue, q.c, q.m, q.n, is_plain(q.epilogue)};
  if (q.accumulate && !Tile::kChained) {
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
  const int64_t tiles = tiles_of(q, {Tile::kBlockM, Tile::kBlockN});
  if (tiles * splits > INT32_MAX) return refuse("gemm_sm80: more than 2^31 - 1 blocks");
  args.counters = scratch.counters;
  args.partials = scratch.partials;

  const int size = bytes_of(q.c.type);
  const auto wide = [&](int64_t stride) { return stride * size % 16 == 0; };
  args.wide_c = q.c.column_stride == 1 && reinterpret_cast<uintptr_t>(q.c.data) % 16 == 0 &&
                (q.m == 1 || wide(q.c.row_stride)) && (q.batch == 1 || wide(q.c.batch_stride));

  const int stage_bytes = Tile::kBlockM * strip_pitch(args.a.path) + Tile::kBlockN * strip_pitch(args.b.path);
  args.stages = stages_for<Tile>(stage_bytes);
  constexpr int kOutputBytes = Tile::kThreads / kWarpThreads * Output<Tile>::kBytes;
  const LaunchConfig config{.name = "gemm_sm80",
                            .grid = static_cast<int>(tiles * splits),
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<size_t>(std::max(args.stages * stage_bytes, kOutputBytes)),
                            .stream = stream};
  return launch(gemm_sm80_kernel<T, Tile>, config, args);
}

}  // namespace
}  // namespace mma_gemm

CopyPath gemm_sm80_path_a(const GemmProblem& q) {
  return mma_gemm::path_of(q.a, q.ld_a, mma_gemm::rows_of_a(q), q.batch_stride_a, q.batch, 0);
}
CopyPath gemm_sm80_path_b(const GemmProblem& q) {
  const int64_t second_half = q.n_major_b && is_halved(q) ? q.n / 2 : 0;  // an offset within the row
  return mma_gemm::path_of(q.b, q.ld_b, mma_gemm::rows_of_b(q), q.batch_stride_b, q.batch, second_half);
}

GemmScratchSize gemm_sm80_scratch(const GemmProblem& q, const GemmSm80Config& config) {
  const int splits = mma_gemm::useful_splits(q.k, config.splits);
  if (splits == 1) return {};
  const mma_gemm::TileSize size = mma_gemm::size_of(config.tile);
  const int64_t tiles = mma_gemm::tiles_of(q, size);
  return {static_cast<size_t>(tiles * size.m * size.n * splits), static_cast<size_t>(tiles)};
}

template <class T>
Status gemm_sm80(const GemmProblem& q, const GemmSm80Config& config, const GemmScratch& scratch, Stream stream) {
  using namespace mma_gemm;
  if (q.accumulate && (q.epilogue.residual.data || q.c.type != DType::kFloat32)) {
    return refuse("gemm_sm80: accumulate takes an fp32 C and no residual");
  }
  const int splits = useful_splits(q.k, config.splits);
  if (q.symmetric) {
    if (q.m != q.n || q.c.type != q.type || q.c.column_stride != 1 || splits > 1)
      return refuse("gemm_sm80: a symmetric C has m = n rows of the type of A, and K is not split");
    if (config.tile == GemmSm80Tile::k64x64)
      return launch_gemm<T, Tile<64, 64, 32, 32, 4, true>>(q, splits, scratch, stream);
    return launch_gemm<T, Tile<128, 128, 64, 64, 2, true>>(q, splits, scratch, stream);
  }
  if (is_chained(q)) {
    if (splits > 1 || !gemm_sm80_chains(config.tile)) return refuse("gemm_sm80: this tile's sums do not start from C");
    if (config.tile == GemmSm80Tile::k64x64)
      return launch_gemm<T, ChainedTile<Tile<64, 64, 32, 32, 4>>>(q, splits, scratch, stream);
    return launch_gemm<T, ChainedTile<Tile<128, 128, 64, 64, 2>>>(q, splits, scratch, stream);
  }
  switch (config.tile) {
    case GemmSm80Tile::k128x256:
      return launch_gemm<T, Tile<128, 256, 64, 64, 1>>(q, splits, scratch, stream);
    case GemmSm80Tile::k128x128:
      return launch_gemm<T, Tile<128, 128, 64, 64, 2>>(q, splits, scratch, stream);
    case GemmSm80Tile::k64x64:
      return launch_gemm<T, Tile<64, 64, 32, 32, 4>>(q, splits, scratch, stream);
  }
  return refuse("gemm_sm80: unknown tile");
}

template Status gemm_sm80<fp16>(const GemmProblem&, const GemmSm80Config&, const GemmScratch&, Stream);
template Status gemm_sm80<bf16>(const GemmProblem&, const GemmSm80Config&, const GemmScratch&, Stream);

}  // namespace ak
