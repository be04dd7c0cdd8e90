// The instances of gemm_sm90, and the kernel that adds the parts of a split product.
#include "kernels/gemm_sm90.h"

#include "kernels/gemm_sm90.cuh"

namespace ak {
namespace {

constexpr int kReduceThreads = 256;
constexpr int kReduceVector = 4;

/// Adds the partial sums of every element in order and stores the result; one thread per kReduceVector columns. Reads 4
/// bytes per element and split; the grid covers the matrix once.
template <class T, GemmOutput kOutput>
AK_KERNEL(kReduceThreads, 4)
gemm_reduce_kernel(const float* partials, void* c, int64_t ld_c, int m, int n, int64_t pitch, int splits) {
  const int columns = (n + kReduceVector - 1) / kReduceVector;
  const int64_t i = static_cast<int64_t>(block_index()) * kReduceThreads + thread_index();
  const int row = static_cast<int>(i / columns), x = static_cast<int>(i % columns) * kReduceVector;
  if (row >= m) return;
  const float* from = partials + row * pitch + x;
  auto sum = load_vec<kReduceVector>(from);  // the pitch is padded, so that this may run over n
  for (int s = 1; s < splits; s++) {
    const auto part = load_vec<kReduceVector, Cache::kStreaming>(from + s * (m * pitch));
    AK_UNROLL
    for (int e = 0; e < kReduceVector; e++) sum[e] += part[e];
  }
  for (int e = 0; e < kReduceVector && x + e < n; e++) {
    const int64_t at = row * ld_c + x + e;
    if constexpr (kOutput == GemmOutput::kInputType) {
      store(static_cast<T*>(c) + at, round_to<T>(sum[e]));
    } else if constexpr (kOutput == GemmOutput::kFloat32) {
      store(static_cast<float*>(c) + at, sum[e]);
    } else {
      float* to = static_cast<float*>(c) + at;
      store(to, load(to) + sum[e]);
    }
  }
}

/// Distance between rows of the partial sums: TMA wants multiples of 16 bytes.
int64_t partial_pitch(int n) { return (n + 3) / 4 * 4; }

Status refuse(const char* why) { return {1, why}; }

template <class T, Major kMajorA, Major kMajorB, GemmOutput kOutput>
Status with_tile(const GemmProblem& q, GemmTile tile, int splits, Stream stream) {
  using namespace gemm;
  switch (tile) {
    case GemmTile::k128x256x2:
      return launch_gemm<T, kMajorA, kMajorB, kOutput, Tile<128, 256, 4, 2, 2>>(q, splits, stream);
    case GemmTile::k128x128:
      return launch_gemm<T, kMajorA, kMajorB, kOutput, Tile<128, 128, 6, 1, 2>>(q, splits, stream);
    case GemmTile::k64x64:
      return launch_gemm<T, kMajorA, kMajorB, kOutput, Tile<64, 64, 12, 1, 1>>(q, splits, stream);
    case GemmTile::k128x144:
      if constexpr (kMajorB == Major::kK && kOutput == GemmOutput::kInputType) {
        return launch_gemm<T, kMajorA, kMajorB, kOutput, Tile<128, 144, 5, 1, 2>>(q, splits, stream);
      } else {
        return refuse("gemm_sm90: tile 128x144 takes only k-major B and 16-bit output");
      }
  }
  return refuse("gemm_sm90: unknown tile");
}

template <class T, GemmOutput kOutput>
Status with_layout(const GemmProblem& q, GemmTile tile, int splits, Stream stream) {
  if (q.m_major_a) {
    return q.n_major_b ? with_tile<T, Major::kMN, Major::kMN, kOutput>(q, tile, splits, stream)
                       : with_tile<T, Major::kMN, Major::kK, kOutput>(q, tile, splits, stream);
  }
  return q.n_major_b ? with_tile<T, Major::kK, Major::kMN, kOutput>(q, tile, splits, stream)
                     : with_tile<T, Major::kK, Major::kK, kOutput>(q, tile, splits, stream);
}

template <class T, GemmOutput kOutput>
Status reduce(const GemmProblem& q, const void* scratch, int splits, Stream stream) {
  const int64_t vectors = static_cast<int64_t>(q.m) * ((q.n + kReduceVector - 1) / kReduceVector);
  const LaunchConfig config{.name = "gemm_reduce",
                            .grid = static_cast<int>((vectors + kReduceThreads - 1) / kReduceThreads),
                            .block = kReduceThreads,
                            .stream = stream};
  return launch(gemm_reduce_kernel<T, kOutput>, config, static_cast<const float*>(scratch), q.c, q.ld_c, q.m, q.n,
                partial_pitch(q.n), splits);
}

/// Without an empty last split: its k steps are rounded up, so fewer of them may be needed.
int useful_splits(int k, int splits) {
  const int steps = gemm::steps_per_split(k, splits);
  return (gemm::steps_per_split(k, 1) + steps - 1) / steps;
}

}  // namespace

template <class T>
Status gemm_sm90(const GemmProblem& q, GemmTile tile, GemmOutput output, Stream stream) {
  switch (output) {
    case GemmOutput::kInputType:
      return with_layout<T, GemmOutput::kInputType>(q, tile, 1, stream);
    case GemmOutput::kFloat32:
      return with_layout<T, GemmOutput::kFloat32>(q, tile, 1, stream);
    case GemmOutput::kAccumulate:
      return with_layout<T, GemmOutput::kAccumulate>(q, tile, 1, stream);
    case GemmOutput::kPartials:
      break;
  }
  return refuse("gemm_sm90: partial sums are gemm_sm90_split's");
}

size_t gemm_sm90_split_bytes(const GemmProblem& q, int splits) {
  return static_cast<size_t>(useful_splits(q.k, splits)) * static_cast<size_t>(q.m) *
         static_cast<size_t>(partial_pitch(q.n)) * 4;
}

template <class T>
Status gemm_sm90_split(const GemmProblem& q, GemmTile tile, GemmOutput output, int splits, void* scratch,
                       Stream stream) {
  splits = useful_splits(q.k, splits);
  GemmProblem partial = q;
  partial.c = scratch;
  partial.ld_c = partial_pitch(q.n);
  const Status status = with_layout<T, GemmOutput::kPartials>(partial, tile, splits, stream);
  if (!status.ok()) return status;
  switch (output) {
    case GemmOutput::kInputType:
      return reduce<T, GemmOutput::kInputType>(q, scratch, splits, stream);
    case GemmOutput::kFloat32:
      return reduce<T, GemmOutput::kFloat32>(q, scratch, splits, stream);
    case GemmOutput::kAccumulate:
      return reduce<T, GemmOutput::kAccumulate>(q, scratch, splits, stream);
    case GemmOutput::kPartials:
      break;
  }
  return refuse("gemm_sm90_split: the output is one of the three final ones");
}

template Status gemm_sm90<fp16>(const GemmProblem&, GemmTile, GemmOutput, Stream);
template Status gemm_sm90<bf16>(const GemmProblem&, GemmTile, GemmOutput, Stream);
template Status gemm_sm90_split<fp16>(const GemmProblem&, GemmTile, GemmOutput, int, void*, Stream);
template Status gemm_sm90_split<bf16>(const GemmProblem&, GemmTile, GemmOutput, int, void*, Stream);

}  // namespace ak
