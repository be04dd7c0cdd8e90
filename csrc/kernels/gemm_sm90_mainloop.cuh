// The main loop of gemm_sm90: which warpgroup works on which tile, how operands come into shared memory, how wgmma
// reads them there, and how the parts of a split k meet again.
//
// Ring of stages: the producer fills a stage of A and B when its `empty` barrier says that all readers are done; `full`
// says that both have arrived. In a cluster of two the blocks share one operand: each loads half of it and multicasts
// it to both, so a stage is empty when the readers of both blocks are done. Cooperative tiles: the consumers share the
// rows of every tile. Pingpong tiles: the two consumers take the block's tiles in turn and hand the tensor cores to
// each other by named barriers, one's epilogue under the other's main loop. Each follows the ring over the other's
// stages without looking at them. Split k: each part leaves its accumulators in scratch, as they lie in the registers,
// and counts itself in; whoever is last adds all parts in the order of k, so the bits do not depend on who that is.
#pragma once
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

/// Hands out the tiles: line by line within groups of lines, where a line is a row of tiles, or a column if
/// `by_columns`. The splits of one tile come one after the other, the matrices of a batch as well.
template <class Tile>
class Scheduler {
 public:
  AK_DEVICE Scheduler(const Schedule& schedule, int rank)
      : s_(schedule), rank_(rank), next_(block_index() / Tile::kCluster) {}

  AK_DEVICE bool more() const { return next_ < s_.works; }

  AK_DEVICE bool next(Work& work) {
    if (!more()) return false;
    const int cluster = next_ / s_.splits, tiles = s_.lines * s_.per_line;
    work.split = next_ - cluster * s_.splits;
    work.tile = cluster * Tile::kCluster + rank_;
    work.batch = cluster / tiles;
    const int in_matrix = cluster - work.batch * tiles;
    const int group = in_matrix / (s_.raster * s_.per_line), in_group = in_matrix - group * (s_.raster * s_.per_line);
    const int first_line = group * s_.raster;
    const int lines = s_.lines - first_line < s_.raster ? s_.lines - first_line : s_.raster;
    const int across = in_group / lines, line = first_line + in_group - across * lines;
    work.m = ((s_.by_columns ? across : line) * Tile::kClusterM + (Tile::kClusterM > 1 ? rank_ : 0)) * Tile::kBlockM;
    work.n = ((s_.by_columns ? line : across) * Tile::kClusterN + (Tile::kClusterN > 1 ? rank_ : 0)) * s_.tile_columns;
    work.first_step = work.split * s_.steps_per_split;
    work.last_step = work.first_step + s_.steps_per_split < s_.steps ? work.first_step + s_.steps_per_split : s_.steps;
    next_ += grid_blocks() / Tile::kCluster;
    return true;
  }

 private:
  const Schedule& s_;
  int rank_, next_;
};

/// Addresses in shared memory, and the place in the ring of stages that a warpgroup has reached.
template <bool kFloat, class Tile>
struct Pipeline {
  uint32_t a, b, staging, full, empty, flags;
  int stage = 0, phase = 0;

  AK_DEVICE Pipeline() {
    a = (dynamic_shared() + 1023) & ~1023u;  // where the swizzle pattern starts
    b = a + Tile::kStages * Tile::kBytesA;
    staging = b + Tile::kStages * Tile::kBytesB;
    full = staging + Tile::kConsumers * staging_bytes<kFloat, Tile>();
    empty = full + 8 * Tile::kStages;
    flags = empty + 8 * Tile::kStages;
  }
  AK_DEVICE void init_barriers() {
    for (int i = 0; i < Tile::kStages; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, Tile::kGroups * Tile::kCluster);
    }
    mbarrier_init_fence();
  }
  AK_DEVICE void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  /// advance() `steps` times.
  AK_DEVICE void skip(int steps) {
    const int to = stage + steps;
    stage = to % Tile::kStages;
    phase ^= to / Tile::kStages & 1;
  }
};

/// Loads kRows rows of an operand (columns, of B) from `first` on, 64 deep in k; with kMulticast into both blocks of
/// the cluster.
template <Major kMajor, int kRows, bool kMulticast>
AK_DEVICE void load_rows(uint32_t to, const TensorMap* map, uint32_t full, int first, int k, int batch) {
  constexpr uint16_t kBoth = 0b11;
  if constexpr (kMajor == Major::kK) {
    if constexpr (kMulticast) {
      tma_load_multicast(to, map, full, k, first, batch, kBoth);
    } else {
      tma_load(to, map, full, k, first, batch);
    }
  } else {
    static_assert(kRows % 64 == 0, "an operand that is not k-major comes in boxes of 64");
    AK_UNROLL
    for (int i = 0; i < kRows / 64; i++) {
      if constexpr (kMulticast) {
        tma_load_multicast(to + i * kSliceBytes, map, full, first + i * 64, k, batch, kBoth);
      } else {
        tma_load(to + i * kSliceBytes, map, full, first + i * 64, k, batch);
      }
    }
  }
}

/// The producer's one thread: fills stages as they become empty.
template <Major kMajorA, Major kMajorB, class Pipeline, class Tile>
AK_DEVICE void produce(Pipeline& p, Scheduler<Tile>& scheduler, const TensorMap* map_a, const TensorMap* map_b,
                       const Args& args, int rank) {
  constexpr bool kShareA = Tile::kClusterN > 1, kShareB = Tile::kClusterM > 1;
  constexpr int kRowsA = Tile::kBlockM / Tile::kClusterN,
                kRowsB = Tile::kBlockN / Tile::kClusterM;  // that this block loads
  constexpr int kRowBytes = kBlockK * 2;
  static_assert(kRowsA % 8 == 0 && kRowsB % 8 == 0, "the swizzle pattern repeats every 8 rows");
  const bool halves = args.schedule.tile_columns < Tile::kBlockN;  // swiglu: a tile's columns lie in two places of B
  const int part_a = kShareA ? rank * kRowsA : 0, part_b = kShareB ? rank * kRowsB : 0;
  Work work;
  while (scheduler.next(work)) {
    const int batch_a = work.batch * args.schedule.batch_a, batch_b = work.batch * args.schedule.batch_b;
    for (int step = work.first_step; step < work.last_step; step++) {
      const int k = step * kBlockK;
      mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);  // a fresh barrier passes: all stages start empty
      const uint32_t full = p.full + 8 * p.stage;
      mbarrier_arrive_expect_tx(full, Tile::kBytesA + Tile::kBytesB);
      const uint32_t a = p.a + p.stage * Tile::kBytesA + part_a * kRowBytes;
      const uint32_t b = p.b + p.stage * Tile::kBytesB + part_b * kRowBytes;
      load_rows<kMajorA, kRowsA, kShareA>(a, map_a, full, work.m + part_a, k, batch_a);
      if constexpr (kShareB) {
        load_rows<kMajorB, kRowsB, true>(b, map_b, full, work.n + rank * args.second_half, k, batch_b);
      } else if (!halves) {
        load_rows<kMajorB, kRowsB, false>(b, map_b, full, work.n, k, batch_b);
      } else if constexpr (kMajorB == Major::kK || kRowsB % 128 == 0) {
        load_rows<kMajorB, kRowsB / 2, false>(b, map_b, full, work.n, k, batch_b);
        load_rows<kMajorB, kRowsB / 2, false>(b + Tile::kBytesB / 2, map_b, full, work.n + args.second_half, k,
                                              batch_b);
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
/// `group` says which of the tile's rows are its own. Calls `issued()` when the last wgmma is on its way.
template <class T, Major kMajorA, Major kMajorB, class Tile, class Pipeline, class Issued>
AK_DEVICE void multiply(Pipeline& p, const Work& work, int group, float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2],
                        Issued issued) {
  const int thread = thread_index() % kGroupThreads;
  auto release = [&](int stage) {
    if (thread < Tile::kCluster) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);
  };
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) wgmma_pin(acc[i]);
  int previous = -1;
  for (int step = work.first_step; step < work.last_step; step++) {
    mbarrier_wait(p.full + 8 * p.stage, p.phase);
    wgmma_fence();
    const uint32_t a = p.a + p.stage * Tile::kBytesA + group * Tile::kSlicesM * kSliceBytes;
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
  issued();
  wgmma_wait<0>();
  release(previous);
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) wgmma_pin(acc[i]);
}

/// Where k is split: leaves this part's sums in scratch. True in the warpgroup whose part comes last, which then has
/// the sum of all parts in `acc`, added in the order of k; the others are done with the tile. The parts are added in
/// scratch, where a loop can reach them, not in the accumulators: it takes a write and a read more of one tile, and no
/// registers beside the accumulators.
template <class Tile>
AK_DEVICE bool combine_splits(const Schedule& s, const Work& work, int group, int consumer, uint32_t flag,
                              float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2]) {
  constexpr int kVectors = Tile::kAccumulators / 4;
  constexpr int kAtOnce = 8, kPartsAtOnce = 2;  // loads that wait for memory together
  constexpr int64_t kPart = static_cast<int64_t>(Tile::kBlockM) * Tile::kBlockN;
  constexpr int kStep = kGroupThreads * 4;
  const int thread = thread_index() % kGroupThreads;
  // [tile][part][group][vector][thread][4]: an access of a warp is 512 bytes in a row.
  float* const parts = s.partials + work.tile * s.splits * kPart + group * (kPart / Tile::kGroups) + thread * 4;
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    store_vec(parts + work.split * kPart + j * kStep, Vec<float, 4>{{d[0], d[1], d[2], d[3]}});
  }
  const auto is_last = shared_at<uint32_t>(flag);
  named_barrier(consumer + 1, kGroupThreads);  // every thread's sums come before thread 0's release
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(s.splits) - 1;
    is_last[0] = atomic_count_acq_rel(s.counters + work.tile * Tile::kGroups + group, last) == last ? 1u : 0u;
  }
  named_barrier(consumer + 1, kGroupThreads);
  if (is_last[0] == 0u) return false;
  AK_NO_UNROLL
  for (int first = 0; first < kVectors; first += kAtOnce) {
    Vec<float, 4> sum[kAtOnce] = {};
    AK_NO_UNROLL
    for (int split = 0; split < s.splits; split += kPartsAtOnce) {
      Vec<float, 4> part[kPartsAtOnce][kAtOnce];
      AK_UNROLL
      for (int q = 0; q < kPartsAtOnce * kAtOnce; q++) {
        const int at = first + q % kAtOnce, of = split + q / kAtOnce;
        const bool there = at < kVectors && of < s.splits;
        part[q / kAtOnce][q % kAtOnce] =
            there ? load_vec<4, Cache::kStreaming>(parts + of * kPart + at * kStep) : Vec<float, 4>{};
      }
      AK_UNROLL
      for (int q = 0; q < kPartsAtOnce * kAtOnce; q++) {
        AK_UNROLL
        for (int e = 0; e < 4; e++) sum[q % kAtOnce][e] += part[q / kAtOnce][q % kAtOnce][e];
      }
    }
    AK_UNROLL
    for (int j = 0; j < kAtOnce; j++) {
      if (first + j < kVectors) store_vec(parts + (first + j) * kStep, sum[j]);
    }
  }
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const auto sum = load_vec<4>(parts + j * kStep);
    float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    AK_UNROLL
    for (int e = 0; e < 4; e++) d[e] = sum[e];
  }
  return true;
}

}  // namespace gemm
}  // namespace ak
