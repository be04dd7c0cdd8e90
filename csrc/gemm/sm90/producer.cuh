// The warpgroup of gemm_sm90 that does not multiply: its first warp, the producer, keeps the ring of stages full; each
// consumer has one of the others as assistant.
//
// Work: of the producer, a TMA load or a few for each step of k; of an assistant, some divisions a tile, and where the
// epilogue goes by boxes (gemm_sm90_boxes.cuh) a load and a store for each. Plan: producer and assistants each ask a
// scheduler of their own, which give the same answers, and one thread of each works. An assistant tells its consumer
// which tile comes next while the products of the one before are made, or with a split k behind them: all that a
// consumer then does between two tiles is to read eight words. Meanwhile it moves the boxes, as only the thread that
// issued a store can wait until it has read them. Traps: these warps have the few registers that the consumers leave.
// What an assistant writes at the desk may be overwritten only when all the consumer's warps have read it.
#pragma once
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/boxes.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

// ---- scheduler: which tile, and which part of k, a block works on next. Producer and assistants each ask one of their
// own, and get the same answers.

/// Asked for anew each time, it takes no register from one tile to the next.
template <class Tile>
AK_DEVICE int rank_in_cluster() {
  if constexpr (Tile::kCluster > 1) return static_cast<int>(cluster_rank());
  return 0;
}

/// Hands out the tiles: line by line within groups of lines, where a line is a row of tiles, or a column if
/// `by_columns`. The splits of one tile come one after the other, the matrices of a batch as well.
template <class Tile>
class Scheduler {
 public:
  AK_DEVICE explicit Scheduler(const Schedule& schedule) : s_(schedule), next_(block_index() / Tile::kCluster) {}

  AK_DEVICE bool more() const { return next_ < s_.work_count; }

  AK_DEVICE bool next(Work& work) {
    if (!more()) return false;
    const int rank = rank_in_cluster<Tile>(), cluster = next_ / s_.splits, tiles = s_.lines * s_.line_length;
    work.split = next_ - cluster * s_.splits;
    work.tile = cluster * Tile::kCluster + rank;
    work.batch = cluster / tiles;
    const int in_matrix = cluster - work.batch * tiles;
    const int group = in_matrix / (s_.raster_lines * s_.line_length),
              in_group = in_matrix - group * (s_.raster_lines * s_.line_length);
    const int first_line = group * s_.raster_lines;
    const int lines = s_.lines - first_line < s_.raster_lines ? s_.lines - first_line : s_.raster_lines;
    const int across = in_group / lines, line = first_line + in_group - across * lines;
    work.m = ((s_.by_columns ? across : line) * Tile::kClusterM + (Tile::kClusterM > 1 ? rank : 0)) * Tile::kBlockM;
    work.n = ((s_.by_columns ? line : across) * Tile::kClusterN + (Tile::kClusterN > 1 ? rank : 0)) * s_.tile_columns;
    work.first_step = work.split * s_.k_steps_per_split;
    const int left = s_.k_steps - work.first_step;
    work.steps = left < s_.k_steps_per_split ? left : s_.k_steps_per_split;
    next_ += grid_blocks() / Tile::kCluster;
    return true;
  }

 private:
  const Schedule& s_;
  int next_;
};

// ---- ring of stages: the producer fills a stage of A and B when its `empty` barrier says that all readers are done;
// `full` says that both have arrived. In a cluster of two the blocks share one operand: each loads half of it and
// multicasts it to both, so a stage is empty when the readers of both blocks are done.

/// Addresses in shared memory, and the place in the ring of stages that a warp or warpgroup has reached.
template <bool kFloat, class Tile>
struct Pipeline {
  uint32_t a, b, staging, full, empty, desks;
  int stage = 0, phase = 0;

  AK_DEVICE Pipeline() {
    a = (dynamic_shared() + 1023) & ~1023u;  // where the swizzle pattern starts
    b = a + Tile::kStages * Tile::kBytesA;
    staging = b + Tile::kStages * Tile::kBytesB;
    full = staging + Tile::kConsumers * staging_bytes<kFloat, Tile>();
    empty = full + 8 * Tile::kStages;
    desks = a + bytes_before_desks<kFloat, Tile>();
  }
  // Opaque: asked for anew each time, they take no register from the main loop.
  AK_DEVICE Desk desk(uint32_t consumer) const { return {opaque(desks) + consumer * Desk::kBytes}; }
  AK_DEVICE uint32_t staging_of(uint32_t consumer) const {
    return opaque(staging) + consumer * staging_bytes<kFloat, Tile>();
  }
  AK_DEVICE void init_barriers() {
    for (int i = 0; i < Tile::kStages; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, Tile::kGroups * Tile::kCluster);
    }
    constexpr int kWarps = kWarpgroupThreads / kWarpThreads;
    for (int i = 0; i < Tile::kConsumers; i++) {
      const Desk d = desk(i);
      mbarrier_init(d.described(), 1);
      mbarrier_init(d.taken(), kWarps);
      mbarrier_init(d.asked(), 1);
      for (int slot = 0; slot < 2; slot++) {
        mbarrier_init(d.ready(slot), 1);
        mbarrier_init(d.finished(slot), kWarps);
      }
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

// ---- producer: one thread asks the TMA unit for the slices of A and B, as far ahead as there are stages.

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

/// Fills a stage, when it is empty, with a step of a tile.
template <Major kMajorA, Major kMajorB, class Tile, class Pipeline>
AK_DEVICE void fill_stage(Pipeline& p, const TensorMap* map_a, const TensorMap* map_b, const Args& args, int rank,
                          const Work& work, int step) {
  constexpr bool kShareA = Tile::kClusterN > 1, kShareB = Tile::kClusterM > 1;
  constexpr int kRowsA = Tile::kBlockM / Tile::kClusterN,
                kRowsB = Tile::kBlockN / Tile::kClusterM;  // that this block loads
  constexpr int kRowBytes = kBlockK * 2;
  static_assert(kRowsA % 8 == 0 && kRowsB % 8 == 0, "the swizzle pattern repeats every 8 rows");
  const bool halves = args.schedule.tile_columns < Tile::kBlockN;  // swiglu: a tile's columns lie in two places of B
  const int my_row_a = kShareA ? rank * kRowsA : 0, my_row_b = kShareB ? rank * kRowsB : 0;
  const int batch_a = work.batch * args.schedule.batch_a, batch_b = work.batch * args.schedule.batch_b;
  const int k = step * kBlockK;
  mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);  // a fresh barrier passes: all stages start empty
  const uint32_t full = p.full + 8 * p.stage;
  mbarrier_arrive_expect_tx(full, Tile::kBytesA + Tile::kBytesB);
  const uint32_t a = p.a + p.stage * Tile::kBytesA + my_row_a * kRowBytes;
  const uint32_t b = p.b + p.stage * Tile::kBytesB + my_row_b * kRowBytes;
  load_rows<kMajorA, kRowsA, kShareA>(a, map_a, full, work.m + my_row_a, k, batch_a);
  if constexpr (kShareB) {
    load_rows<kMajorB, kRowsB, true>(b, map_b, full, work.n + rank * args.second_half, k, batch_b);
  } else if (!halves) {
    load_rows<kMajorB, kRowsB, false>(b, map_b, full, work.n, k, batch_b);
  } else if constexpr (kMajorB == Major::kK || kRowsB % 128 == 0) {
    load_rows<kMajorB, kRowsB / 2, false>(b, map_b, full, work.n, k, batch_b);
    load_rows<kMajorB, kRowsB / 2, false>(b + Tile::kBytesB / 2, map_b, full, work.n + args.second_half, k, batch_b);
  }
}

template <Major kMajorA, Major kMajorB, class Tile, class Pipeline>
AK_DEVICE void produce(Pipeline& p, const TensorMap* map_a, const TensorMap* map_b, const Args& args) {
  Scheduler<Tile> scheduler(args.schedule);
  const int rank = rank_in_cluster<Tile>();
  Work work;
  while (scheduler.next(work)) {
    AK_NO_UNROLL
    for (int step = 0; step < work.steps; step++, p.advance())
      fill_stage<kMajorA, kMajorB, Tile>(p, map_a, map_b, args, rank, work, work.first_step + step);
  }
}

// ---- assistant: which tile the consumer takes next, and its boxes.

/// Passes over the next tile; false if there is none.
template <class Tile, class Pipeline>
AK_DEVICE bool skip_next(Scheduler<Tile>& scheduler, Pipeline& p, Work& work) {
  const bool there = scheduler.next(work);
  if (there) p.skip(work.steps);
  return there;
}

/// Writes down the consumer's next tile and the place of its first step in the ring, which is where `p` is; false if
/// there is none. `others_first`: pingpong, a tile of the other's comes before it.
template <class Tile, class Pipeline>
AK_DEVICE bool describe_next(Scheduler<Tile>& scheduler, Pipeline& p, Desk desk, bool others_first, Work& work) {
  work = {};  // of the one before nothing need be kept
  const bool there = (!others_first || skip_next(scheduler, p, work)) && scheduler.next(work);
  const auto word = [](int x) { return static_cast<uint32_t>(x); };
  store_shared_16(desk.work(), {{word(work.m), word(work.n), word(work.batch), there ? word(work.steps) : 0}});
  store_shared_16(desk.work() + 16,
                  {{word(work.split), word(work.tile), word(p.stage * 2 + p.phase), scheduler.more()}});
  mbarrier_arrive(desk.described());
  p.skip(work.steps);
  return there;
}

/// What a consumer learns of its next tile.
struct Task {
  Work work;   ///< steps is 0 behind the last; first_step is the producer's to know
  bool other;  ///< pingpong: a tile of the other's comes behind it
};

/// Called by a consumer; `phase`: of its calls, one bit. Sets `p` to the tile's place in the ring.
template <class Pipeline>
AK_DEVICE Task take_task(Pipeline& p, Desk desk, int phase) {
  mbarrier_wait(desk.described(), phase);
  const auto a = load_shared_16(desk.work()), b = load_shared_16(desk.work() + 16);
  const auto number = [](uint32_t x) { return static_cast<int>(x); };
  const Work work{number(a[0]), number(a[1]), number(a[2]), 0, number(a[3]), number(b[0]), number(b[1])};
  p.stage = number(b[2] / 2);
  p.phase = number(b[2] % 2);
  warp_sync();
  if (lane_of_tile() == 0) mbarrier_arrive(desk.taken());
  return {work, b[3] != 0};
}

template <bool kFloat, class Tile>
AK_DEVICE void assist(Pipeline<kFloat, Tile>& p, int consumer, const TensorMap* map_c, const TensorMap* beside,
                      const Args& args) {
  Scheduler<Tile> scheduler(args.schedule);
  const Desk desk = p.desk(consumer);
  const bool in_boxes = Tile::kTakesEpilogue && args.way.finish == Finish::kBoxes;
  if (in_boxes) prefetch_tensor_map(map_c);
  if (in_boxes && args.reads) prefetch_tensor_map(beside);
  uint32_t phases = 0;  // of the barriers where the assistant waits, a bit each
  const auto wait_phase = [&](uint32_t barrier, int bit) {
    mbarrier_wait(barrier, phases >> bit & 1);
    phases ^= 1 << bit;
  };
  constexpr int kAsked = 2, kTaken = 3;  // behind those of the slots
  Work work;
  bool more = describe_next(scheduler, p, desk, Tile::kPingpong && consumer == 1, work);
  while (more) {
    wait_phase(desk.taken(), kTaken);
    using Walk = Boxes<kFloat, Tile>;
    const Work taken = work;
    bool wanted = in_boxes && Walk(args, taken, consumer).steps > 0;
    if (wanted && args.reads && taken.split == 0) Walk(args, taken, consumer).prefetch(beside);
    if (wanted && args.asks) {
      wait_phase(desk.asked(), kAsked);
      wanted = args.schedule.splits == 1 || shared_at<uint32_t>(desk.last())[0] != 0u;
      if (wanted && args.z_first) {  // the slots are the consumer's, for z
        bulk_wait_read<0>();
        mbarrier_arrive(desk.ready(0));
        wait_phase(desk.asked(), kAsked);
      }
    }
    if (wanted) give_first_boxes(Walk(args, taken, consumer), beside, p.staging_of(consumer), desk, args.reads);
    // Not before last() has been read, which the consumer's next tile writes anew.
    more = describe_next(scheduler, p, desk, Tile::kPingpong, work);
    if (wanted)
      move_boxes(Walk(args, taken, consumer), map_c, beside, p.staging_of(consumer), desk, args.reads, phases);
  }
  bulk_wait<0>();  // shared memory must live until the stores have read it
}

}  // namespace gemm
}  // namespace ak
