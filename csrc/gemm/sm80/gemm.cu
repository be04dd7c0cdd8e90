// Instances of gemm_sm80 and their launch.
#include "gemm/sm80/launch.cuh"

namespace ak {
namespace mma_gemm {
namespace {

template <class T, class Tile>
Status launch_gemm(const GemmProblem& q, int splits, const GemmScratch& scratch, Stream stream) {
  const int64_t tiles = tiles_of(q, {Tile::kBlockM, Tile::kBlockN});
  if (tiles * splits > INT32_MAX) return refuse("gemm_sm80: more than 2^31 - 1 blocks");
  Args args = arguments<Tile>(q, splits);
  args.counters = scratch.counters;
  args.partials = scratch.partials;
  const LaunchConfig config{.name = "gemm_sm80",
                            .grid = static_cast<int>(tiles * splits),
                            .block = Tile::kThreads,
                            .shared_bytes = shared_bytes<Tile>(args),
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
