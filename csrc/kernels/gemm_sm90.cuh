// gemm_sm90: C = A B on Hopper, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops against 2 (m k + k n) + 2 or 4 m n bytes. From a few hundred in every dimension on the tensor
// cores are the limit, and on a large product the power they draw. Everything below exists to keep them busy. Plan: a
// persistent grid; each block (or pair of blocks, a cluster) takes output tiles in turn. One warpgroup, the producer,
// only asks the TMA unit to bring 64-wide slices of A and B into a ring of stages in shared memory; one or two others,
// the consumers, each own some rows of the tile and run wgmma straight from there. `full` barriers say that a stage has
// arrived, `empty` barriers that all its readers are done. In a cluster the two blocks share the columns of B: each
// loads half and multicasts it to both. The accumulators leave through shared memory: a swizzled box for a TMA store,
// or, for widths that are no multiple of 64, rows that each warp stores. All four layouts are the same code: an operand
// that is contiguous along m or n is loaded in boxes of 64 x 64 and its descriptors say so. Traps: a stage may be
// released only when the wgmma that read it is known to be complete, which is one k step later than it was issued. In a
// cluster a stage is released to both blocks, since both write into it, and no block may exit before its peer's last
// arrival. Threads write the staging buffer through another proxy than the store reads it: each writer fences, then all
// meet, then one stores.
#pragma once
#include <algorithm>

#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/registers.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/gemm_sm90.h"

namespace ak {
namespace gemm {

constexpr int kBlockK = 64;               // 128 bytes: one row of the swizzle
constexpr int kSliceBytes = 64 * 64 * 2;  // 64 rows (or columns) of one stage
constexpr int kGroupThreads = 128;

/// A tile of C and how it is worked on. Rows are shared out evenly among the consumer warpgroups.
template <int kBlockM_, int kBlockN_, int kStages_, int kCluster_, int kConsumers_>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_,
                       kConsumers = kConsumers_;
  static constexpr int kThreads = kGroupThreads * (1 + kConsumers);
  static constexpr int kConsumerM = kBlockM / kConsumers;
  static constexpr int kSlicesM = kConsumerM / 64;  // wgmma is 64 rows high
  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr bool kBoxes = kBlockN % 64 == 0;  // 16-bit output goes through TMA boxes of 64 columns
  static constexpr int kStageColumns = kBlockN % 128 == 0 ? 128 : 64;  // of 16-bit output, staged at a time
  static constexpr int kRowPitch = kBlockN * 2 + 16;  // without boxes; 16 bytes on, so that rows differ in banks
  static_assert(kConsumers == 1 || kConsumers == 2, "one or two consumer warpgroups");
  static_assert(kConsumerM % 64 == 0, "a consumer's rows are a multiple of 64");
  static_assert(
      kStages >= 2,
      "a stage is released one step after its use: with a single one, producer and consumer wait for each other");
};

template <GemmOutput kOutput, class Tile>
constexpr int staging_bytes() {
  if (kOutput != GemmOutput::kInputType) return 64 * 64 * 4;
  return Tile::kBoxes ? 64 * Tile::kStageColumns * 2 : 64 * Tile::kRowPitch;
}
template <GemmOutput kOutput, class Tile>
constexpr int shared_bytes() {
  constexpr int kAlignment = 1024, kBarriers = 16 * Tile::kStages;
  return kAlignment + Tile::kStages * (Tile::kBytesA + Tile::kBytesB) +
         Tile::kConsumers * staging_bytes<kOutput, Tile>() + kBarriers;
}

struct Args {
  void* c;
  int64_t ld_c;
  int m, n, k;
  int splits;
  int raster;  // rows of tiles that are walked together, so that their slices of A and B stay in L2
};

/// Number of k steps of one split.
AK_HD int steps_per_split(int k, int splits) { return ((k + kBlockK - 1) / kBlockK + splits - 1) / splits; }

/// What a cluster works on: one tile for each of its blocks, below each other.
struct Work {
  int m, n;                   // first row and column of this block's tile
  int first_step, last_step;  // of k
  int split;
};

/// Hands out the tiles: column by column within groups of `raster` rows.
template <class Tile>
class Scheduler {
 public:
  AK_DEVICE Scheduler(const Args& args, int rank) : args_(args), rank_(rank) {
    rows_ = (args.m + Tile::kBlockM * Tile::kCluster - 1) / (Tile::kBlockM * Tile::kCluster);
    columns_ = (args.n + Tile::kBlockN - 1) / Tile::kBlockN;
    next_ = block_index() / Tile::kCluster;
  }

  AK_DEVICE bool next(Work& work) {
    if (next_ >= rows_ * columns_ * args_.splits) return false;
    work.split = next_ / (rows_ * columns_);
    const int tile = next_ % (rows_ * columns_);
    const int group = tile / (args_.raster * columns_), in_group = tile % (args_.raster * columns_);
    const int first_row = group * args_.raster;
    const int rows = rows_ - first_row < args_.raster ? rows_ - first_row : args_.raster;
    work.m = ((first_row + in_group % rows) * Tile::kCluster + rank_) * Tile::kBlockM;
    work.n = in_group / rows * Tile::kBlockN;
    const int steps = steps_per_split(args_.k, args_.splits), all_steps = (args_.k + kBlockK - 1) / kBlockK;
    work.first_step = work.split * steps;
    work.last_step = work.first_step + steps < all_steps ? work.first_step + steps : all_steps;
    next_ += grid_blocks() / Tile::kCluster;
    return true;
  }

 private:
  const Args& args_;
  int rank_, rows_, columns_, next_;
};

/// Addresses in shared memory, and the place in the ring of stages that a warpgroup has reached.
template <GemmOutput kOutput, class Tile>
struct Pipeline {
  uint32_t a, b, staging, full, empty;
  int stage = 0, phase = 0;

  AK_DEVICE Pipeline() {
    a = (dynamic_shared() + 1023) & ~1023u;  // where the swizzle pattern starts
    b = a + Tile::kStages * Tile::kBytesA;
    staging = b + Tile::kStages * Tile::kBytesB;
    full = staging + Tile::kConsumers * staging_bytes<kOutput, Tile>();
    empty = full + 8 * Tile::kStages;
  }
  AK_DEVICE void init_barriers() {
    for (int i = 0; i < Tile::kStages; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, Tile::kConsumers * Tile::kCluster);
    }
    mbarrier_init_fence();
  }
  AK_DEVICE void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// The producer's one thread: fills stages as they become empty.
template <Major kMajorA, Major kMajorB, class Pipeline, class Tile>
AK_DEVICE void produce(Pipeline& p, Scheduler<Tile>& scheduler, const TensorMap* map_a, const TensorMap* map_b,
                       int rank) {
  // Each block of the cluster brings its share of B's columns to all of them.
  constexpr int kShareN = Tile::kBlockN / Tile::kCluster;
  constexpr uint16_t kEveryBlock = (1 << Tile::kCluster) - 1;
  static_assert(kMajorB == Major::kK || kShareN % 64 == 0,
                "an n-major B comes in boxes of 64 columns, per block of the cluster");
  static_assert(kShareN % 8 == 0, "the swizzle pattern repeats every 8 rows");
  Work work;
  while (scheduler.next(work)) {
    for (int step = work.first_step; step < work.last_step; step++) {
      const int k = step * kBlockK;
      mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);  // a fresh barrier passes: all stages start empty
      const uint32_t full = p.full + 8 * p.stage;
      mbarrier_arrive_expect_tx(full, Tile::kBytesA + Tile::kBytesB);
      const uint32_t a = p.a + p.stage * Tile::kBytesA;
      if constexpr (kMajorA == Major::kK) {
        tma_load(a, map_a, full, k, work.m);
      } else {
        for (int i = 0; i < Tile::kBlockM / 64; i++) tma_load(a + i * kSliceBytes, map_a, full, work.m + i * 64, k);
      }
      const uint32_t b = p.b + p.stage * Tile::kBytesB + rank * kShareN * kBlockK * 2;
      const int n = work.n + rank * kShareN;
      if constexpr (kMajorB == Major::kK && Tile::kCluster == 1) {
        tma_load(b, map_b, full, k, n);
      } else if constexpr (kMajorB == Major::kK) {
        tma_load_multicast(b, map_b, full, k, n, kEveryBlock);
      } else {
        for (int i = 0; i < kShareN / 64; i++) {
          if constexpr (Tile::kCluster == 1) {
            tma_load(b + i * kSliceBytes, map_b, full, n + i * 64, k);
          } else {
            tma_load_multicast(b + i * kSliceBytes, map_b, full, n + i * 64, k, kEveryBlock);
          }
        }
      }
      p.advance();
    }
  }
}

/// Descriptor of the k16 slice number `k16` of a tile that starts at `address`.
template <Major kMajor>
AK_DEVICE uint64_t operand(uint32_t address, int k16) {
  return kMajor == Major::kK ? wgmma_descriptor(address + k16 * 32, 16, 1024)
                             : wgmma_descriptor(address + k16 * 2048, kSliceBytes, 1024);
}

/// One consumer's main loop: sums the steps of `work` into `acc`, releasing each stage once its wgmma are complete.
template <class T, Major kMajorA, Major kMajorB, class Tile, class Pipeline>
AK_DEVICE void multiply(Pipeline& p, const Work& work, int consumer, float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2]) {
  const int thread = thread_index() % kGroupThreads;
  auto release = [&](int stage) {
    if (thread < Tile::kCluster) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);
  };
  int previous = -1;
  for (int step = work.first_step; step < work.last_step; step++) {
    mbarrier_wait(p.full + 8 * p.stage, p.phase);
    wgmma_fence();
    const uint32_t a = p.a + p.stage * Tile::kBytesA + consumer * Tile::kSlicesM * kSliceBytes;
    const uint32_t b = p.b + p.stage * Tile::kBytesB;
    AK_UNROLL
    for (int k16 = 0; k16 < kBlockK / 16; k16++) {
      AK_UNROLL
      for (int i = 0; i < Tile::kSlicesM; i++) {
        const bool accumulate = step != work.first_step || k16 != 0;
        wgmma<T, kMajorA, kMajorB>(acc[i], operand<kMajorA>(a + i * kSliceBytes, k16), operand<kMajorB>(b, k16),
                                   accumulate);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step is complete, this one keeps the tensor cores busy
    if (previous >= 0) release(previous);
    previous = p.stage;
    p.advance();
  }
  wgmma_wait<0>();
  release(previous);
}

/// The four registers that stmatrix_x4 takes: 16 columns of a slice, from column 16 j on, rounded.
template <class T>
AK_DEVICE void round_16_columns(const float* acc, int j, uint32_t (&r)[4]) {
  AK_UNROLL
  for (int i = 0; i < 4; i++) r[i] = round_pair<T>(acc[8 * j + 2 * i], acc[8 * j + 2 * i + 1]);
}

/// Byte offset, in a box with rows of 128 bytes, of 16-byte chunk `chunk` of row `row`.
AK_DEVICE uint32_t in_box(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

/// Stores a slice of 64 rows as 16-bit values by TMA, kStageColumns at a time.
template <class T, class Tile>
AK_DEVICE void store_rounded_boxes(const float (&acc)[Tile::kBlockN / 2], const TensorMap* map_c, uint32_t staging,
                                   int consumer, int m, int n, const Args& args) {
  constexpr int kColumns = Tile::kStageColumns;
  const int thread = thread_index() % kGroupThreads, warp = thread / kWarpThreads, lane = lane_index();
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / kColumns; part++) {
    if (thread == 0) bulk_wait_read<0>();  // the last store has left the staging buffer
    named_barrier(consumer + 1, kGroupThreads);
    AK_UNROLL
    for (int j = 0; j < kColumns / 16; j++) {
      uint32_t r[4];
      round_16_columns<T>(acc + part * kColumns / 2, j, r);
      const int row = warp * 16 + lane % 16, chunk = j * 2 + lane / 16;
      stmatrix_x4(staging + chunk / 8 * kSliceBytes + in_box(row, chunk % 8), r);
    }
    fence_proxy_async();
    named_barrier(consumer + 1, kGroupThreads);
    if (thread == 0) {
      for (int box = 0; box < kColumns / 64; box++) {
        const int x = n + part * kColumns + box * 64;
        if (x < args.n) tma_store(map_c, staging + box * kSliceBytes, x, m);
      }
      bulk_commit();
    }
  }
}

/// Stores a slice of 64 rows as 16-bit values, each warp its 16 rows, for widths that do not divide into boxes.
template <class T, class Tile>
AK_DEVICE void store_rounded_rows(const float (&acc)[Tile::kBlockN / 2], uint32_t staging, int m, int n,
                                  const Args& args) {
  constexpr int kPitch = Tile::kRowPitch, kChunks = Tile::kBlockN / 8;
  const int warp = thread_index() % kGroupThreads / kWarpThreads, lane = lane_index();
  const uint32_t mine = staging + warp * 16 * kPitch;
  AK_UNROLL
  for (int j = 0; j < Tile::kBlockN / 16; j++) {
    uint32_t r[4];
    round_16_columns<T>(acc, j, r);
    stmatrix_x4(mine + lane % 16 * kPitch + (j * 2 + lane / 16) * 16, r);
  }
  warp_sync();
  for (int i = lane; i < 16 * kChunks; i += kWarpThreads) {
    const int row = i / kChunks, chunk = i % kChunks, y = m + warp * 16 + row, x = n + chunk * 8;
    if (y >= args.m || x >= args.n) continue;
    const auto eight = load_shared_16(mine + row * kPitch + chunk * 16);
    T* to = static_cast<T*>(args.c) + y * args.ld_c + x;
    if (x + 8 <= args.n) {
      store_vec(reinterpret_cast<uint32_t*>(to), eight);
    } else {
      AK_UNROLL
      for (int e = 0; e < 8; e++) {
        if (x + e < args.n) store(to + e, T{static_cast<uint16_t>(eight[e / 2] >> (16 * (e % 2)))});
      }
    }
  }
  warp_sync();  // the rows are read before the next slice overwrites them
}

/// Stores a slice of 64 rows in fp32 by TMA, or adds it, 64 columns at a time: two boxes with rows of 32 values.
template <GemmOutput kOutput, class Tile>
AK_DEVICE void store_float_boxes(const float (&acc)[Tile::kBlockN / 2], const TensorMap* map_c, uint32_t staging,
                                 int consumer, int m, int n, int split, const Args& args) {
  const int thread = thread_index() % kGroupThreads, warp = thread / kWarpThreads, lane = lane_index();
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / 64; part++) {
    if (thread == 0) bulk_wait_read<0>();
    named_barrier(consumer + 1, kGroupThreads);
    AK_UNROLL
    for (int j = 0; j < 8; j++) {
      const float* d = acc + part * 32 + j * 4;
      const int row = warp * 16 + lane / 4, column = j * 8 + lane % 4 * 2;
      const uint32_t box = staging + column / 32 * kSliceBytes, in_chunk = column % 4 * 4;
      const int chunk = column % 32 / 4;
      store_shared_2(box + in_box(row, chunk) + in_chunk, d[0], d[1]);
      store_shared_2(box + in_box(row + 8, chunk) + in_chunk, d[2], d[3]);
    }
    fence_proxy_async();
    named_barrier(consumer + 1, kGroupThreads);
    if (thread == 0) {
      for (int box = 0; box < 2; box++) {
        const int x = n + part * 64 + box * 32;
        if (x >= args.n) continue;
        const uint32_t from = staging + box * kSliceBytes;
        if constexpr (kOutput == GemmOutput::kAccumulate) {
          tma_reduce_add(map_c, from, x, m);
        } else if constexpr (kOutput == GemmOutput::kPartials) {
          tma_store(map_c, from, x, m, split);
        } else {
          tma_store(map_c, from, x, m);
        }
      }
      bulk_commit();
    }
  }
}

template <class T, Major kMajorA, Major kMajorB, GemmOutput kOutput, class Tile>
AK_KERNEL(Tile::kThreads, 1)
gemm_sm90_kernel(AK_PARAM(TensorMap) map_a, AK_PARAM(TensorMap) map_b, AK_PARAM(TensorMap) map_c, AK_PARAM(Args) args) {
  static_assert(kOutput == GemmOutput::kInputType || Tile::kBoxes, "fp32 output goes through boxes of 64 columns");
  static_assert(shared_bytes<kOutput, Tile>() <= 232448, "the stages do not fit into shared memory");
  Pipeline<kOutput, Tile> p;
  int rank = 0;
  if constexpr (Tile::kCluster > 1) rank = static_cast<int>(cluster_rank());
  if (thread_index() == 0) p.init_barriers();
  if constexpr (Tile::kCluster > 1) {
    cluster_sync();
  } else {
    block_sync();
  }

  Scheduler<Tile> scheduler(args, rank);
  const int warpgroup = thread_index() / kGroupThreads, thread = thread_index() % kGroupThreads;
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers == 2) registers_decrease<40>();
    if (thread == 0) produce<kMajorA, kMajorB>(p, scheduler, &map_a, &map_b, rank);
  } else {
    if constexpr (Tile::kConsumers == 2) registers_increase<232>();
    const int consumer = warpgroup - 1;
    const uint32_t staging = p.staging + consumer * staging_bytes<kOutput, Tile>();
    float acc[Tile::kSlicesM][Tile::kBlockN / 2];
    Work work;
    while (scheduler.next(work)) {
      multiply<T, kMajorA, kMajorB, Tile>(p, work, consumer, acc);
      AK_UNROLL
      for (int i = 0; i < Tile::kSlicesM; i++) {
        const int m = work.m + consumer * Tile::kConsumerM + i * 64;
        if constexpr (kOutput != GemmOutput::kInputType) {
          store_float_boxes<kOutput, Tile>(acc[i], &map_c, staging, consumer, m, work.n, work.split, args);
        } else if constexpr (Tile::kBoxes) {
          store_rounded_boxes<T, Tile>(acc[i], &map_c, staging, consumer, m, work.n, args);
        } else {
          store_rounded_rows<T, Tile>(acc[i], staging, m, work.n, args);
        }
      }
    }
    if (thread == 0) bulk_wait<0>();  // shared memory must live until the stores have read it
  }
  if constexpr (Tile::kCluster > 1) cluster_sync();  // and until the peer's last arrival
}

/// Tensor maps, shape of the grid, launch. `splits` is 1 but for partial sums.
template <class T, Major kMajorA, Major kMajorB, GemmOutput kOutput, class Tile>
Status launch_gemm(const GemmProblem& q, int splits, Stream stream) {
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  const auto size = [](int x) { return static_cast<uint64_t>(x); };
  const auto k_major = [&](const void* p, int rows, int64_t ld, uint32_t box_rows) {
    return TensorMapSpec{p, kType, 2, {size(q.k), size(rows)}, {static_cast<uint64_t>(ld)}, {kBlockK, box_rows}};
  };
  const auto mn_major = [&](const void* p, int rows, int64_t ld) {
    return TensorMapSpec{p, kType, 2, {size(rows), size(q.k)}, {static_cast<uint64_t>(ld)}, {64, kBlockK}};
  };
  TensorMap map_a, map_b, map_c;
  Status status = make_tensor_map(
      &map_a, kMajorA == Major::kK ? k_major(q.a, q.m, q.ld_a, Tile::kBlockM) : mn_major(q.a, q.m, q.ld_a));
  if (!status.ok()) return status;
  status = make_tensor_map(&map_b, kMajorB == Major::kK ? k_major(q.b, q.n, q.ld_b, Tile::kBlockN / Tile::kCluster)
                                                        : mn_major(q.b, q.n, q.ld_b));
  if (!status.ok()) return status;
  const uint64_t ld_c = static_cast<uint64_t>(q.ld_c), plane = ld_c * size(q.m);
  TensorMapSpec c{q.c, ElementType::kFloat32, 2, {size(q.n), size(q.m), size(splits)}, {ld_c, plane}, {32, 64, 1}};
  if (kOutput == GemmOutput::kPartials) {
    c.rank = 3;
    c.size[0] = ld_c;  // zeros up to the pitch, so that whoever adds the parts may read whole vectors
  }
  if (kOutput == GemmOutput::kInputType) {
    c.type = kType;
    c.box[0] = 64;
  }
  status = make_tensor_map(&map_c, c);
  if (!status.ok()) return status;

  const auto tiles_of = [](int x, int tile) { return (x + tile - 1) / tile; };
  const int tiles = tiles_of(q.m, Tile::kBlockM * Tile::kCluster) * tiles_of(q.n, Tile::kBlockN) * splits;
  const int clusters = std::min(device_sm_count() / Tile::kCluster, tiles);
  const Args args{q.c, q.ld_c, q.m, q.n, q.k, splits, 8};
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = std::max(clusters, 1) * Tile::kCluster,
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<kOutput, Tile>()),
                            .cluster = Tile::kCluster,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajorA, kMajorB, kOutput, Tile>, config, map_a, map_b, map_c, args);
}

}  // namespace gemm
}  // namespace ak
