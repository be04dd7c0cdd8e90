// The producer warpgroup of gemm_sm90: one producer warp, which keeps the ring of stages full, and one scheduler warp
// per consumer.
//
// Work: the producer issues one to eight TMA loads per k step. A scheduler warp does a few divisions per tile and, in
// the TMA epilogue (epilogue_tma.cuh), a load and a store per box. Plan: every warp runs its own copy of the tile
// scheduler, with the same results, in a single thread. A scheduler warp posts the next tile to its consumer during the
// main loop of the current one (with split k, after it), so between two tiles a consumer only reads eight words. It
// also moves the boxes, since only the thread that issued a bulk store can wait until the store has read its source.
// Traps: these warps have only the registers that the consumers leave. A posted tile may be overwritten only when all
// warps of the consumer have read it.
#pragma once
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/epilogue_tma.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

// ---- tile scheduler: the tile and the part of k that a block works on next.

/// Reread on each use, so that it holds no register between tiles.
template <class Tile>
AK_DEVICE int rank_in_cluster() {
  if constexpr (Tile::kCluster > 1) return static_cast<int>(cluster_rank());
  return 0;
}

/// Rasterizes the tiles in groups of lines; a line is a row of tiles, or a column if `by_columns`. Within a group the
/// tiles go across the lines first. The splits of a tile are consecutive, the matrices of a batch outermost.
template <class Tile>
class TileScheduler {
 public:
  AK_DEVICE explicit TileScheduler(const Schedule& schedule) : s_(schedule), next_(block_index() / Tile::kCluster) {}

  AK_DEVICE bool more() const { return next_ < s_.work_count; }

  AK_DEVICE bool next(Work& work) {
    if (!more()) return false;
    const int rank = rank_in_cluster<Tile>(), cluster = next_ / s_.splits, tiles = s_.tiles;
    work.split = next_ - cluster * s_.splits;
    work.tile = cluster * Tile::kCluster + rank;
    work.batch = cluster / tiles;
    const int in_matrix = cluster - work.batch * tiles;
    work.first_step = work.split * s_.k_steps_per_split;
    const int left = s_.k_steps - work.first_step;
    work.steps = left < s_.k_steps_per_split ? left : s_.k_steps_per_split;
    next_ += s_.clusters;
    if constexpr (Tile::kTriangular) {
      place_in_triangle(in_matrix, work);
    } else {
      place_in_rectangle(in_matrix, rank, work);
    }
    return true;
  }

 private:
  AK_DEVICE void place_in_rectangle(int in_matrix, int rank, Work& work) const {
    const int group = in_matrix / (s_.raster_lines * s_.line_length),
              in_group = in_matrix - group * (s_.raster_lines * s_.line_length);
    const int first_line = group * s_.raster_lines;
    const int lines = s_.lines - first_line < s_.raster_lines ? s_.lines - first_line : s_.raster_lines;
    const int across = in_group / lines, line = first_line + in_group - across * lines;
    work.m = ((s_.by_columns ? across : line) * Tile::kClusterM + (Tile::kClusterM > 1 ? rank : 0)) * Tile::kBlockM;
    work.n = ((s_.by_columns ? line : across) * Tile::kClusterN + (Tile::kClusterN > 1 ? rank : 0)) * s_.tile_columns;
  }

  /// Walks on from the strip of the tile before, whose matrix may be another one.
  AK_DEVICE void place_in_triangle(int in_matrix, Work& work) {
    const auto tiles = [&] { return gemm_sm90_tiles_of_strip(Tile::kBlockM, Tile::kBlockN, strip_); };
    if (in_matrix < before_strip_) strip_ = before_strip_ = 0;
    AK_NO_UNROLL
    while (in_matrix >= before_strip_ + tiles()) {
      before_strip_ += tiles();
      strip_++;
    }
    work.m = strip_ * Tile::kBlockM;
    work.n = (in_matrix - before_strip_) * Tile::kBlockN;
  }

  const Schedule& s_;
  int next_;
  int strip_ = 0, before_strip_ = 0;  // of a symmetric C: the strip of the last tile, and the tiles of those above
};

/// Tiles of a grouped product, group by group. Every role walks the groups by itself: a block enters all groups up to
/// its last tile, and adjacent ends share a cache line.
template <class Tile>
class GroupedScheduler {
 public:
  AK_DEVICE explicit GroupedScheduler(const Args& args) : args_(args), tile_(block_index()) {
    enter_group();
    find_group();
  }

  AK_DEVICE bool more() const { return group_ < group_count(); }

  AK_DEVICE bool next(Work& work) {
    if (!more()) return false;
    const Schedule& s = args_.schedule;
    const GroupPlace place = place_in_group(tile_, lines_of_group(), s.line_length);
    work.m = (Tile::kRowGroups ? begin_ : 0) + place.line * Tile::kBlockM;
    work.n = place.column * s.tile_columns;
    work.batch = group_;
    work.begin = begin_, work.end = end_;
    work.first_step = 0;
    work.steps = Tile::kTermGroups ? blocks(end_ - begin_, kBlockK) : group_ < args_.groups.count ? s.k_steps : 0;
    tile_ += s.clusters;
    find_group();
    return true;
  }

 private:
  AK_DEVICE static int blocks(int x, int by) { return (x + by - 1) / by; }
  /// The rows past the last end are like a group, without terms.
  AK_DEVICE int group_count() const { return args_.groups.count + (Tile::kRowGroups ? 1 : 0); }

  /// Rows of tiles.
  AK_DEVICE int lines_of_group() const {
    if constexpr (Tile::kRowGroups) return blocks(end_ - begin_, Tile::kBlockM);
    return begin_ == end_ && args_.output == Output::kAccumulate ? 0 : args_.schedule.lines;
  }
  /// Moves to the group of the next tile.
  AK_DEVICE void find_group() {
    AK_NO_UNROLL
    while (more()) {
      const int tiles = lines_of_group() * args_.schedule.line_length;
      if (tile_ < tiles) return;
      tile_ -= tiles;
      begin_ = end_;
      group_++;
      if (more()) enter_group();
    }
  }
  AK_DEVICE void enter_group() {
    const GroupEnds& groups = args_.groups;
    int end = groups.total;
    if (group_ < groups.count) end = load(groups.offs + group_ * groups.stride);
    end_ = end < begin_ ? begin_ : end > groups.total ? groups.total : end;
  }

  const Args& args_;
  int tile_;  // the next one, counted from the group's first
  int group_ = 0, begin_ = 0, end_ = 0;
};

template <class Tile>
using SchedulerOf = std::conditional_t<Tile::kGrouping == Grouping::kNone, TileScheduler<Tile>, GroupedScheduler<Tile>>;
/// The argument of its constructor.
template <class Tile>
AK_DEVICE const auto& scheduled_by(const Args& args) {
  if constexpr (Tile::kGrouping == Grouping::kNone) {
    return args.schedule;
  } else {
    return args;
  }
}

// ---- ring of stages: a stage's `empty` barrier completes when all consumers have read it, its `full` barrier when A
// and B have arrived. In a cluster of two the blocks share one operand: each loads half of it and multicasts it to
// both, so a stage is empty when the consumers of both blocks are done.

/// Shared memory addresses, and a warp's position in the ring of stages.
template <bool kFloat, class Tile>
struct Pipeline {
  static constexpr bool kGrouped = Tile::kGrouping != Grouping::kNone;
  uint32_t a, b, staging, full, empty, mailboxes;
  int stage = 0, phase = 0;

  AK_DEVICE Pipeline() {
    a = (dynamic_shared() + 1023) & ~1023u;  // the swizzle pattern repeats every 1,024 bytes
    b = a + Tile::kStages * Tile::kBytesA;
    staging = b + Tile::kStages * Tile::kBytesB;
    full = staging + Tile::kConsumers * staging_bytes<kFloat, Tile>();
    empty = full + 8 * Tile::kStages;
    mailboxes = a + bytes_before_mailboxes<kFloat, Tile>();
  }
  // Opaque: recomputed on each use, so that they hold no register during the main loop.
  AK_DEVICE Mailbox mailbox(uint32_t consumer) const { return {opaque(mailboxes) + consumer * Mailbox::kBytes}; }
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
      const Mailbox d = mailbox(i);
      mbarrier_init(d.work_full(), 1);
      mbarrier_init(d.work_empty(), kWarps);
      mbarrier_init(d.slot_requested(), 1);
      for (int slot = 0; slot < 2; slot++) {
        mbarrier_init(d.slot_ready(slot), 1);
        mbarrier_init(d.slot_done(slot), kWarps);
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

// ---- producer: one thread issues the TMA loads of A and B, as far ahead as there are stages.

/// The maps of A. Where A is several matrices, the maps that an epilogue would have are those of the others.
struct MapsOfA {
  const TensorMap *first, *second, *third;
};

/// The map for a box of A at `x` of the contiguous dimension, which becomes relative to the matrix.
template <class Tile>
AK_DEVICE const TensorMap* map_at(const MapsOfA& maps, const Args& args, int& x) {
  const TensorMap* map = maps.first;
  if constexpr (Tile::kTakesSegments) {
    int begin = 0;
    if (x >= args.more_a[0]) map = maps.second, begin = args.more_a[0];
    if (x >= args.more_a[1]) map = maps.third, begin = args.more_a[1];
    x -= begin;
  }
  return map;
}

/// Loads kRows rows of A or columns of B from `first` on, 64 deep in k; kMulticast: into both blocks of the cluster.
/// `map_of(x)` is the map for a box at `x` of the contiguous dimension, and may change x.
template <Major kMajor, int kRows, bool kMulticast, class MapOf>
AK_DEVICE void load_rows(uint32_t to, const MapOf& map_of, uint32_t full, int first, int k, int batch) {
  constexpr uint16_t kBoth = 0b11;
  if constexpr (kMajor == Major::kK) {
    const TensorMap* map = map_of(k);
    if constexpr (kMulticast) {
      tma_load_multicast(to, map, full, k, first, batch, kBoth);
    } else {
      tma_load(to, map, full, k, first, batch);
    }
  } else {
    constexpr int kWidth = gemm_sm90_box_width(kRows);
    static_assert(kWidth > 0, "gemm_sm90_takes_layout() refuses such a tile");
    AK_UNROLL
    for (int i = 0; i < kRows / kWidth; i++) {
      int x = first + i * kWidth;
      const TensorMap* map = map_of(x);
      if constexpr (kMulticast) {
        tma_load_multicast(to + i * box_bytes(kWidth), map, full, x, k, batch, kBoth);
      } else {
        tma_load(to + i * box_bytes(kWidth), map, full, x, k, batch);
      }
    }
  }
}

/// Loads kRows rows of A or columns of B from `first` on, and 64 terms from `k` on: zeros from term `end` on.
template <int kRows>
AK_DEVICE void load_terms(uint32_t to, const TensorMap* map, uint32_t full, int first, int k, int end) {
  AK_UNROLL
  for (int i = 0; i < kRows / 64; i++)
    tma_load(to + i * kSliceBytes, map, full, first + i * 64, ragged_line(k, end), kRaggedLines, end);
}

/// Waits until a stage is empty, then loads one k step of a tile into it.
template <Major kMajorA, Major kMajorB, class Tile, class Pipeline>
AK_DEVICE void fill_stage(Pipeline& p, const MapsOfA& maps_a, const TensorMap* map_b, const Args& args, int rank,
                          const Work& work, int step) {
  constexpr bool kShareA = Tile::kClusterN > 1, kShareB = Tile::kClusterM > 1;
  constexpr int kRowsA = Tile::kBlockM / Tile::kClusterN,
                kRowsB = Tile::kBlockN / Tile::kClusterM;  // loaded by this block
  constexpr int kRowBytes = kBlockK * 2;
  static_assert(kRowsA % 8 == 0 && kRowsB % 8 == 0, "the swizzle pattern repeats every 8 rows");
  const bool halves = args.schedule.tile_columns < Tile::kBlockN;  // swiglu: a tile's columns are two spans of B
  const int my_row_a = kShareA ? rank * kRowsA : 0, my_row_b = kShareB ? rank * kRowsB : 0;
  const int batch_a = work.batch * args.schedule.batch_a, batch_b = work.batch * args.schedule.batch_b;
  const int k = step * kBlockK;
  mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);  // passes on a fresh barrier: all stages start empty
  const uint32_t full = p.full + 8 * p.stage;
  const bool lone = has_lone_slice<Tile>(work);
  mbarrier_arrive_expect_tx(full, (lone ? kSliceBytes : Tile::kBytesA) + Tile::kBytesB);
  const uint32_t a = p.a + p.stage * Tile::kBytesA + my_row_a * kRowBytes;
  const uint32_t b = p.b + p.stage * Tile::kBytesB + my_row_b * kRowBytes;
  if constexpr (Tile::kTermGroups) {
    load_terms<kRowsA>(a, maps_a.first, full, work.m, work.begin + k, work.end);
    load_terms<kRowsB>(b, map_b, full, work.n, work.begin + k, work.end);
    return;
  }
  const auto of_a = [&](int& x) { return map_at<Tile>(maps_a, args, x); };
  const auto of_b = [&](int&) { return map_b; };
  if constexpr (Tile::kRowGroups) {
    load_rows<kMajorA, 64, false>(a, of_a, full, work.m, k, batch_a);
    if (!lone) load_rows<kMajorA, 64, false>(a + kSliceBytes, of_a, full, work.m + 64, k, batch_a);
  } else {
    load_rows<kMajorA, kRowsA, kShareA>(a, of_a, full, work.m + my_row_a, k, batch_a);
  }
  if constexpr (kShareB) {
    load_rows<kMajorB, kRowsB, true>(b, of_b, full, work.n + rank * args.second_half, k, batch_b);
  } else if (!halves) {
    load_rows<kMajorB, kRowsB, false>(b, of_b, full, work.n, k, batch_b);
  } else if constexpr (kMajorB == Major::kK || kRowsB % 128 == 0) {
    load_rows<kMajorB, kRowsB / 2, false>(b, of_b, full, work.n, k, batch_b);
    load_rows<kMajorB, kRowsB / 2, false>(b + Tile::kBytesB / 2, of_b, full, work.n + args.second_half, k, batch_b);
  }
}

template <Major kMajorA, Major kMajorB, class Tile, class Pipeline>
AK_DEVICE void produce(Pipeline& p, const MapsOfA& maps_a, const TensorMap* map_b, const Args& args) {
  SchedulerOf<Tile> scheduler(scheduled_by<Tile>(args));
  const int rank = rank_in_cluster<Tile>();
  Work work;
  while (scheduler.next(work)) {
    AK_NO_UNROLL
    for (int step = 0; step < work.steps; step++, p.advance())
      fill_stage<kMajorA, kMajorB, Tile>(p, maps_a, map_b, args, rank, work, work.first_step + step);
  }
}

// ---- scheduler warp.

/// A consumer's next tile.
struct NextWork {
  Work work;           ///< steps is kEndMark after the last tile; first_step is not set
  bool other_follows;  ///< pingpong: the other consumer has the next tile
};

/// The tile posted last; sets `p` to the ring position of its first step.
template <class Pipeline>
AK_DEVICE NextWork posted(Pipeline& p, Mailbox mailbox) {
  const auto a = load_shared_16(mailbox.work()), b = load_shared_16(mailbox.work() + 16);
  const auto number = [](uint32_t x) { return static_cast<int>(x); };
  p.stage = number(b[2] / 2);
  p.phase = number(b[2] % 2);
  Work work{};
  work.m = number(a[0]), work.n = number(a[1]), work.batch = number(a[2]);
  if constexpr (Pipeline::kGrouped) {
    work.end = number(a[3]), work.steps = number(b[0]);
  } else {
    work.steps = number(a[3]), work.split = number(b[0]), work.tile = number(b[1]);
  }
  return {work, b[3] != 0};
}

/// Posts the consumer's next tile and the ring position of its first step; false if there is none. The position follows
/// from the tile posted before. `other_goes_first`: pingpong, the tile before it is the other consumer's.
template <class Tile, class Pipeline>
AK_DEVICE bool post_next(SchedulerOf<Tile>& scheduler, Pipeline& p, Mailbox mailbox, bool other_goes_first) {
  p.skip(posted(p, mailbox).work.steps);
  Work work{};
  if (other_goes_first && scheduler.next(work)) p.skip(work.steps);
  work = {};  // that tile may be the last
  const bool exists = scheduler.next(work);
  const auto word = [](int x) { return static_cast<uint32_t>(x); };
  if constexpr (Pipeline::kGrouped) {
    if (!exists) work.steps = Tile::kEndMark;
    store_shared_16(mailbox.work(), {{word(work.m), word(work.n), word(work.batch), word(work.end)}});
    store_shared_16(mailbox.work() + 16, {{word(work.steps), 0u, word(p.stage * 2 + p.phase), scheduler.more()}});
    mbarrier_arrive(mailbox.work_full());
    return exists;
  }
  store_shared_16(mailbox.work(), {{word(work.m), word(work.n), word(work.batch), word(work.steps)}});
  store_shared_16(mailbox.work() + 16,
                  {{word(work.split), word(work.tile), word(p.stage * 2 + p.phase), scheduler.more()}});
  mbarrier_arrive(mailbox.work_full());
  return exists;
}

/// Waits for the consumer's next tile and sets `p` to its ring position; `phase` is the bit of work_full().
template <class Pipeline>
AK_DEVICE NextWork take_work(Pipeline& p, Mailbox mailbox, int phase) {
  mbarrier_wait(mailbox.work_full(), phase);
  const NextWork next = posted(p, mailbox);
  warp_sync();
  if (lane_in_warp() == 0) mbarrier_arrive(mailbox.work_empty());
  return next;
}

template <bool kFloat, class Tile>
AK_DEVICE void run_scheduler_warp(Pipeline<kFloat, Tile>& p, const TensorMap* map_c, const TensorMap* map_aux,
                                  const Args& args) {
  const auto consumer = [] {
    return static_cast<int>(static_cast<uint32_t>(opaque(thread_index())) / kWarpThreads) - 1;
  };
  SchedulerOf<Tile> scheduler(scheduled_by<Tile>(args));
  const Mailbox mailbox = p.mailbox(consumer());
  const bool by_tma = Tile::kTakesBoxes && args.path.fused == FusedEpilogue::kTma;
  if (by_tma) prefetch_tensor_map(map_c);
  if (by_tma && args.reads_aux) prefetch_tensor_map(map_aux);
  uint32_t phases = 0;  // phase bits of the barriers this warp waits on
  const auto wait_phase = [&](uint32_t barrier, int bit) {
    mbarrier_wait(barrier, phases >> bit & 1);
    phases ^= 1 << bit;
  };
  // Rereads the tile: between the uses it would hold registers that this warp does not have.
  const auto boxes = [&] {
    const auto place = load_shared_16(mailbox.place());
    Work work{};
    work.m = static_cast<int>(place[0]), work.n = static_cast<int>(place[1]), work.batch = static_cast<int>(place[2]);
    if constexpr (Tile::kRowGroups) work.end = static_cast<int>(place[3]);
    return TileBoxes<kFloat, Tile>(args, work, consumer());
  };
  constexpr int kSlotRequested = 2, kWorkEmpty = 3;  // bits after those of the two slots
  store_shared_16(mailbox.work(), {});
  store_shared_16(mailbox.work() + 16, {});  // the ring begins at stage 0
  bool more = post_next<Tile>(scheduler, p, mailbox, Tile::kPingpong && consumer() == 1);
  while (more) {
    wait_phase(mailbox.work_empty(), kWorkEmpty);
    store_shared_16(mailbox.place(), load_shared_16(mailbox.work()));
    const bool first_split = shared_at<uint32_t>(mailbox.work() + 16)[0] == 0u;
    bool wanted = by_tma && boxes().steps > 0;
    if (wanted && args.reads_aux && first_split) boxes().prefetch(map_aux, args.m);
    if (wanted && args.needs_slot_request) {
      wait_phase(mailbox.slot_requested(), kSlotRequested);
      wanted = args.schedule.splits == 1 || shared_at<uint32_t>(mailbox.is_last_split())[0] != 0u;
      if (wanted && args.stores_z_first) {  // the consumer stages z in the slots
        bulk_wait_read<0>();
        mbarrier_arrive(mailbox.slot_ready(0));
        wait_phase(mailbox.slot_requested(), kSlotRequested);
      }
    }
    if (wanted) fill_first_slots(boxes(), map_aux, p.staging_of(consumer()), mailbox, args.reads_aux);
    // Post only after is_last_split() has been read: the consumer's next tile overwrites it.
    more = post_next<Tile>(scheduler, p, mailbox, Tile::kPingpong);
    if (wanted)
      store_and_refill_slots(boxes(), map_c, map_aux, p.staging_of(consumer()), mailbox, args.reads_aux, phases);
  }
  bulk_wait<0>();  // shared memory must outlive the stores' reads
}

}  // namespace gemm
}  // namespace ak
