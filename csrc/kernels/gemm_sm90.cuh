// gemm_sm90: C = A B on Hopper, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops against 2 (m k + k n) + 2 or 4 m n bytes. From a few hundred in every dimension on the tensor
// cores are the limit, and on a large product the power they draw. Everything below exists to keep them busy. Plan: a
// persistent grid; each block (or pair of blocks, a cluster) takes output tiles in turn. One warpgroup, the producer,
// only asks the TMA unit to bring 64-wide slices of A and B into a ring of stages in shared memory; one to three
// others, the consumers, run wgmma straight from there (gemm_sm90_mainloop.cuh). The accumulators leave through shared
// memory: a swizzled box for a TMA store, or, for widths that are no multiple of 64, rows that each warp stores
// (gemm_sm90_epilogue.cuh). All four layouts are the same code: an operand that is contiguous along m or n is loaded in
// boxes of 64 x 64 and its descriptors say so. A batch is the third dimension of every tensor map, so a tile never runs
// over into the next matrix. Traps: a stage may be released only when the wgmma that read it is known to be complete,
// which is one k step later than it was issued. In a cluster a stage is released to both blocks, since both write into
// it, and no block may exit before its peer's last arrival. Threads write the staging buffer through another proxy than
// the store reads it: each writer fences, then all meet, then one stores.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/registers.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_sm90.h"
#include "kernels/gemm_sm90_epilogue.cuh"
#include "kernels/gemm_sm90_mainloop.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

template <class T, Major kMajorA, Major kMajorB, bool kFloat, class Tile>
AK_KERNEL(Tile::kThreads, 1)
gemm_sm90_kernel(AK_PARAM(TensorMap) map_a, AK_PARAM(TensorMap) map_b, AK_PARAM(TensorMap) map_c, AK_PARAM(Args) args) {
  static_assert(!kFloat || Tile::kBoxes, "fp32 output goes through boxes of 64 columns");
  static_assert(shared_bytes<kFloat, Tile>() <= kSharedLimit, "the stages do not fit into shared memory");
  constexpr int kTurn = 1 + Tile::kConsumers;  // named barriers: one a consumer, then one for its turn
  Pipeline<kFloat, Tile> p;
  int rank = 0;
  if constexpr (Tile::kCluster > 1) rank = static_cast<int>(cluster_rank());
  if (thread_index() == 0) {
    prefetch_tensor_map(&map_a);
    prefetch_tensor_map(&map_b);
    p.init_barriers();
  }
  if constexpr (Tile::kCluster > 1) {
    cluster_sync();
  } else {
    block_sync();
  }
  wait_for_previous_kernel();  // up to here the two run side by side
  allow_next_kernel();         // whose blocks come as this kernel's leave

  Scheduler<Tile> scheduler(args.schedule, rank);
  const int warpgroup = thread_index() / kGroupThreads, thread = thread_index() % kGroupThreads;
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers > 1) registers_decrease<Tile::kProducerRegisters>();
    if (thread == 0) produce<kMajorA, kMajorB>(p, scheduler, &map_a, &map_b, args, rank);
  } else {
    if constexpr (Tile::kConsumers > 1) registers_increase<Tile::kConsumerRegisters>();
    const int consumer = warpgroup - 1, group = Tile::kPingpong ? 0 : consumer;
    const uint32_t staging = p.staging + consumer * staging_bytes<kFloat, Tile>();
    bool first = true, others_turn = consumer == 1;
    Work work;
    for (; scheduler.next(work); first = false, others_turn = !others_turn) {
      if constexpr (Tile::kPingpong) {
        if (others_turn) {
          p.skip(work.last_step - work.first_step);
          continue;
        }
        if (!first) named_barrier(kTurn + consumer, 2 * kGroupThreads);
      }
      float acc[Tile::kSlicesM][Tile::kBlockN / 2];
      multiply<T, kMajorA, kMajorB, Tile>(p, work, group, acc, [&] {
        if constexpr (Tile::kPingpong) {
          if (scheduler.more()) named_barrier_arrive(kTurn + 1 - consumer, 2 * kGroupThreads);
        }
      });
      if (args.schedule.splits > 1 &&
          !combine_splits<Tile>(args.schedule, work, group, consumer, p.flags + 4 * consumer, acc))
        continue;
      const int m = work.m + group * Tile::kGroupM;
      if (Tile::kMayFinish && !args.finish.plain) {
        finish_tile<T, kFloat, Tile>(acc, &map_c, staging, consumer, m, work, args);
      } else {
        store_tile<T, kFloat, Tile>(acc, &map_c, staging, consumer, m, work, args);
      }
    }
    if (thread == 0) bulk_wait<0>();  // shared memory must live until the stores have read it
  }
  if constexpr (Tile::kCluster > 1) cluster_sync();  // and until the peer's last arrival
}

template <class Tile>
Schedule make_schedule(const GemmProblem& q, const Args& args, int splits, const GemmScratch& scratch, int clusters) {
  Schedule s{};
  s.tile_columns = args.tile_columns;
  const int rows = divide_up(q.m, Tile::kBlockM * Tile::kClusterM);
  const int columns = divide_up(args.columns, args.tile_columns * Tile::kClusterN);
  // What is outside the lines walked together is read once per group: the smaller of A and B, which may stay in L2.
  s.by_columns = q.n > q.m;
  s.lines = s.by_columns ? columns : rows;
  s.per_line = s.by_columns ? rows : columns;
  // All blocks together then work on about a square of C, whose rows and columns are the least to read; in equal
  // groups.
  const int tall = Tile::kBlockM * Tile::kClusterM, wide = Tile::kBlockN * Tile::kClusterN;
  const double shape = s.by_columns ? static_cast<double>(tall) / wide : static_cast<double>(wide) / tall;
  const int together = std::max(1, static_cast<int>(std::lround(std::sqrt(clusters * shape / splits))));
  s.raster = divide_up(s.lines, divide_up(s.lines, together));
  s.splits = splits;
  s.steps = divide_up(q.k, kBlockK);
  s.steps_per_split = divide_up(s.steps, splits);
  s.works = rows * columns * q.batch * splits;
  s.batch_a = q.batch_stride_a != 0;
  s.batch_b = q.batch_stride_b != 0;
  s.partials = scratch.partials;
  s.counters = scratch.counters;
  return s;
}

/// Tensor maps, shape of the grid, launch. kFloat: `output` is one of those in fp32.
template <class T, Major kMajorA, Major kMajorB, bool kFloat, class Tile>
Status launch_gemm(const GemmProblem& q, GemmOutput output, int splits, const GemmScratch& scratch, Stream stream) {
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  // A map of all matrices of a batch, or of the one that they share.
  const auto map = [&](TensorMap* to, Major major, const void* p, int rows, int64_t ld, int64_t batch_stride,
                       int box_rows) {
    const bool one = batch_stride == 0;
    TensorMapSpec spec{p,
                       kType,
                       3,
                       {size(q.k), size(rows), one ? 1 : size(q.batch)},
                       {size(ld), size(one ? ld : batch_stride)},
                       {kBlockK, static_cast<uint32_t>(box_rows), 1}};
    if (major == Major::kMN) {
      std::swap(spec.size[0], spec.size[1]);
      spec.box[0] = 64;
      spec.box[1] = kBlockK;
    }
    return make_tensor_map(to, spec);
  };
  Args args = arguments<T, kFloat, Tile>(q, output);
  const bool halved = args.tile_columns < Tile::kBlockN;  // swiglu
  if (halved && Tile::kBlockN % 128 != 0) return {1, "gemm_sm90: swiglu takes tiles of 128 or 256 columns"};
  if (!Tile::kMayFinish && !args.finish.plain)
    return {1, "gemm_sm90: this tile has no registers for an epilogue, or for a C that TMA cannot write"};
  TensorMap map_a, map_b, map_c{};
  Status status = map(&map_a, kMajorA, q.a, q.m, q.ld_a, q.batch_stride_a, Tile::kBlockM / Tile::kClusterN);
  if (!status.ok()) return status;
  status = map(&map_b, kMajorB, q.b, q.n, q.ld_b, q.batch_stride_b, Tile::kBlockN / (halved ? 2 : Tile::kClusterM));
  if (!status.ok()) return status;
  if (!args.finish.direct) {
    const uint64_t ld_c = size(q.c.row_stride), plane = q.batch == 1 ? ld_c : size(q.c.batch_stride);
    const TensorMapSpec c{q.c.data,
                          kFloat ? ElementType::kFloat32 : kType,
                          3,
                          {size(args.columns), size(q.m), size(q.batch)},
                          {ld_c, plane},
                          {kFloat ? 32u : 64u, 64, 1}};
    status = make_tensor_map(&map_c, c);
    if (!status.ok()) return status;
  }
  const int clusters = std::max(device_sm_count() / Tile::kCluster, 1);
  args.schedule = make_schedule<Tile>(q, args, splits, scratch, clusters);
  // No more blocks than the same number of rounds needs: the others would only draw power.
  const int rounds = divide_up(args.schedule.works, clusters);
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = divide_up(args.schedule.works, rounds) * Tile::kCluster,
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<kFloat, Tile>()),
                            .cluster = Tile::kCluster,
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajorA, kMajorB, kFloat, Tile>, config, map_a, map_b, map_c, args);
}

/// Tile number kIndex; and how many stages of it shared memory holds.
template <int kIndex, int kStages>
using Staged = Tile<kGemmTiles[kIndex].m, kGemmTiles[kIndex].n, kStages,
                    kGemmTiles[kIndex].cluster_m * kGemmTiles[kIndex].cluster_n, kGemmTiles[kIndex].consumers,
                    kGemmTiles[kIndex].pingpong, (kGemmTiles[kIndex].cluster_n > 1)>;
template <int kIndex, bool kFloat>
constexpr int stages() {
  constexpr int kTwo = shared_bytes<kFloat, Staged<kIndex, 2>>(), kThree = shared_bytes<kFloat, Staged<kIndex, 3>>();
  return 2 + (kSharedLimit - kTwo) / (kThree - kTwo);
}

/// launch_gemm with the tile that `config` names, one of those from kIndex to kEnd - 1.
template <class T, Major kMajorA, Major kMajorB, int kIndex, int kEnd>
Status with_tile(const GemmProblem& q, const GemmSm90Config& config, GemmOutput output, const GemmScratch& scratch,
                 Stream stream) {
  constexpr GemmTile kTile = kGemmTiles[kIndex];
  if (config.tile != kIndex) {
    if constexpr (kIndex + 1 < kEnd)
      return with_tile<T, kMajorA, kMajorB, kIndex + 1, kEnd>(q, config, output, scratch, stream);
    return {1, "gemm_sm90: there is no such tile"};
  }
  if constexpr (kMajorB == Major::kK || kTile.n / kTile.cluster_m % 64 == 0) {
    if constexpr (kTile.n % 64 == 0) {  // fp32 leaves in boxes, else element by element
      if (output != GemmOutput::kInputType) {
        return launch_gemm<T, kMajorA, kMajorB, true, Staged<kIndex, stages<kIndex, true>()>>(q, output, config.splits,
                                                                                              scratch, stream);
      }
    }
    return launch_gemm<T, kMajorA, kMajorB, false, Staged<kIndex, stages<kIndex, false>()>>(q, output, config.splits,
                                                                                            scratch, stream);
  }
  return {1, "gemm_sm90: this tile takes only a k-major B"};
}

/// gemm_sm90 with the tiles from kFirst to kEnd - 1.
template <class T, int kFirst, int kEnd>
Status run(const GemmProblem& problem, const GemmSm90Config& config, GemmOutput output, const GemmScratch& scratch,
           Stream stream) {
  if (output == GemmOutput::kPartials) return {1, "gemm_sm90: parts are added in the launch"};
  if (const char* why = gemm_sm90_refuses(problem, config)) return {1, why};
  GemmSm90Config c = config;
  c.splits = gemm_sm90_splits(problem.k, config.splits);
  if (c.splits > 1 && (scratch.partials == nullptr || scratch.counters == nullptr))
    return {1, "gemm_sm90: a split product needs scratch"};
  const GemmProblem q = c.swapped ? swapped(problem) : problem;
  constexpr Major kK = Major::kK, kMN = Major::kMN;
  if (q.m_major_a) {
    return q.n_major_b ? with_tile<T, kMN, kMN, kFirst, kEnd>(q, c, output, scratch, stream)
                       : with_tile<T, kMN, kK, kFirst, kEnd>(q, c, output, scratch, stream);
  }
  return q.n_major_b ? with_tile<T, kK, kMN, kFirst, kEnd>(q, c, output, scratch, stream)
                     : with_tile<T, kK, kK, kFirst, kEnd>(q, c, output, scratch, stream);
}

}  // namespace gemm

template <class T>
Status gemm_sm90(const GemmProblem& problem, const GemmSm90Config& config, GemmOutput output,
                 const GemmScratch& scratch, Stream stream) {
  return gemm::run<T, 0, kGemmTileCount>(problem, config, output, scratch, stream);
}

}  // namespace ak
