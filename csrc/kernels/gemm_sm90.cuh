// gemm_sm90: C = A B on Hopper, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops against 2 (m k + k n) + 2 or 4 m n bytes. From a few hundred in every dimension on the tensor
// cores are the limit, and on a large product the power they draw. Everything below exists to keep them busy. Plan: a
// persistent grid; each block (or pair of blocks, a cluster) takes output tiles in turn. One warpgroup, the producer,
// only asks the TMA unit to bring 64-wide slices of A and B into a ring of stages in shared memory; one to three
// others, the consumers, run wgmma straight from there. The accumulators leave through shared memory: rounded, in a
// swizzled box for a TMA store or, for widths that are no multiple of 64 and a C whose rows begin anywhere, in rows
// that each warp stores (gemm_sm90_store.cuh). Where more is to be done than add a bias, it is done on the way to such
// a box (gemm_sm90_boxes.cuh) or, for a C or operands that TMA cannot move, element by element
// (gemm_sm90_elements.cuh). All four layouts are the same code: an operand that is contiguous along m or n is
// loaded in boxes of 64 x 64 and its descriptors say so. A batch is the third dimension of every tensor map, so a tile
// never runs over into the next matrix. Traps: a stage may be released only when the wgmma that read it is known to be
// complete, which is one k step later than it was issued. In a cluster a stage is released to both blocks, since both
// write into it, and no block may exit before its peer's last arrival. Threads write the staging buffer through another
// proxy than the store reads it: each writer fences, then all meet, then one stores.
//
// The phases, from top to bottom: scheduler, ring of stages, producer, main loop, sum of the parts of a split k, the
// kernel that ties them together, and the launch.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/mbarrier.cuh"
#include "device/registers.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/gemm_sm90.h"
#include "kernels/gemm_sm90_boxes.cuh"
#include "kernels/gemm_sm90_elements.cuh"
#include "kernels/gemm_sm90_store.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

// ---- scheduler: which tile, and which part of k, a block works on next. Producer and consumers each ask one of their
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
    work.last_step =
        work.first_step + s_.k_steps_per_split < s_.k_steps ? work.first_step + s_.k_steps_per_split : s_.k_steps;
    next_ += grid_blocks() / Tile::kCluster;
    if (Tile::kConsumers < 3) next_ = opaque(next_);  // else the compiler counts the tiles in a register of their own
    return true;
  }

 private:
  const Schedule& s_;
  int next_;
};

// ---- ring of stages: the producer fills a stage of A and B when its `empty` barrier says that all readers are done;
// `full` says that both have arrived. In a cluster of two the blocks share one operand: each loads half of it and
// multicasts it to both, so a stage is empty when the readers of both blocks are done.

/// Addresses in shared memory, and the place in the ring of stages that a warpgroup has reached.
template <bool kFloat, class Tile>
struct Pipeline {
  uint32_t a, b, staging, full, empty, loaded, flags;
  int stage = 0, phase = 0;

  AK_DEVICE Pipeline() {
    a = (dynamic_shared() + 1023) & ~1023u;  // where the swizzle pattern starts
    b = a + Tile::kStages * Tile::kBytesA;
    staging = b + Tile::kStages * Tile::kBytesB;
    full = staging + Tile::kConsumers * staging_bytes<kFloat, Tile>();
    empty = full + 8 * Tile::kStages;
    loaded = empty + 8 * Tile::kStages;  // the boxes that the epilogue reads: two of each consumer
    flags = loaded + 16 * Tile::kConsumers;
  }
  AK_DEVICE void init_barriers() {
    for (int i = 0; i < Tile::kStages; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, Tile::kGroups * Tile::kCluster);
    }
    for (int i = 0; i < 2 * Tile::kConsumers; i++) mbarrier_init(loaded + 8 * i, 1);
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
    for (int step = work.first_step; step < work.last_step; step++, p.advance())
      fill_stage<kMajorA, kMajorB, Tile>(p, map_a, map_b, args, rank, work, step);
  }
}

// ---- main loop of a consumer: wgmma reads both operands from shared memory, one k step in flight while the next is
// issued. Cooperative tiles: the consumers share the rows of every tile. Pingpong tiles: the two consumers take the
// block's tiles in turn and hand the tensor cores to each other by named barriers, one's epilogue under the other's
// main loop. Each follows the ring over the other's stages without looking at them.

/// Descriptor of the k16 slice number `k16` of a tile that starts at `address`.
template <Major kMajor>
AK_DEVICE uint64_t operand_descriptor(uint32_t address, int k16) {
  return kMajor == Major::kK ? wgmma_descriptor(address + k16 * 32, 16, 1024)
                             : wgmma_descriptor(address + k16 * 2048, kSliceBytes, 1024);
}

/// One consumer's main loop: sums the steps of `work` into `acc`, releasing each stage once its wgmma are complete.
/// `group` says which of the tile's rows are its own. Calls `all_issued()` when the last wgmma is on its way.
template <class T, Major kMajorA, Major kMajorB, class Tile, class Pipeline, class AllIssued>
AK_DEVICE void main_loop(Pipeline& p, const Work& work, int group, float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2],
                         AllIssued all_issued) {
  const int thread = thread_of_warpgroup();
  auto release = [&](int stage) {
    if (thread < Tile::kCluster) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);
  };
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) wgmma_pin(acc[i]);
  int previous = -1;  // the stage whose wgmma may still run
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
        wgmma<T, kMajorA, kMajorB>(acc[i], operand_descriptor<kMajorA>(a + i * kSliceBytes, k16),
                                   operand_descriptor<kMajorB>(b, k16), accumulate);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step is complete, this one keeps the tensor cores busy
    if (previous >= 0) release(previous);
    previous = p.stage;
    p.advance();
  }
  all_issued();
  wgmma_wait<0>();
  release(previous);
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) wgmma_pin(acc[i]);
}

// ---- split k: each part leaves its accumulators in scratch, as they lie in the registers, and counts itself in;
// whoever is last adds all parts in the order of k, so the bits do not depend on who that is.

/// True in the warpgroup whose part comes last, which then has the sum of all parts in `acc`; the others are done with
/// the tile. The parts are added in scratch, where a loop can reach them, not in the accumulators: it takes a write and
/// a read more of one tile, and no registers beside the accumulators.
template <class Tile>
AK_DEVICE bool reduce_splits(const Schedule& s, const Work& work, int group, int consumer, uint32_t flag,
                             float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2]) {
  constexpr int kVectors = Tile::kAccumulators / 4;
  constexpr int kVectorsInFlight = 8, kPartsInFlight = 2;  // loads that wait for memory together
  constexpr int64_t kPartSize = static_cast<int64_t>(Tile::kBlockM) * Tile::kBlockN;
  constexpr int kVectorPitch = kWarpgroupThreads * 4;
  const int thread = thread_of_warpgroup();
  // This part goes to [tile][part][group][vector][thread][4]: an access of a warp is 512 bytes in a row.
  float* const parts = s.partials + work.tile * s.splits * kPartSize + group * (kPartSize / Tile::kGroups) + thread * 4;
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    store_vec(parts + work.split * kPartSize + j * kVectorPitch, Vec<float, 4>{{d[0], d[1], d[2], d[3]}});
  }
  // Count it in; thread 0 tells the others whether it is the last.
  named_barrier(consumer + 1, kWarpgroupThreads);  // every thread's sums come before thread 0's release
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(s.splits) - 1;
    store_shared_4(flag, atomic_count_acq_rel(s.counters + work.tile * Tile::kGroups + group, last) == last ? 1u : 0u);
  }
  named_barrier(consumer + 1, kWarpgroupThreads);
  if (shared_at<uint32_t>(flag)[0] == 0u) return false;
  // Add all parts, over the first one.
  AK_NO_UNROLL
  for (int first = 0; first < kVectors; first += kVectorsInFlight) {
    Vec<float, 4> sum[kVectorsInFlight] = {};
    AK_NO_UNROLL
    for (int split = 0; split < s.splits; split += kPartsInFlight) {
      Vec<float, 4> part[kPartsInFlight][kVectorsInFlight];
      AK_UNROLL
      for (int q = 0; q < kPartsInFlight * kVectorsInFlight; q++) {  // all loads before the first sum
        const int at = first + q % kVectorsInFlight, of = split + q / kVectorsInFlight;
        const bool exists = at < kVectors && of < s.splits;
        part[q / kVectorsInFlight][q % kVectorsInFlight] =
            exists ? load_vec<4, Cache::kStreaming>(parts + of * kPartSize + at * kVectorPitch) : Vec<float, 4>{};
      }
      AK_UNROLL
      for (int q = 0; q < kPartsInFlight * kVectorsInFlight; q++) {
        AK_UNROLL
        for (int e = 0; e < 4; e++) sum[q % kVectorsInFlight][e] += part[q / kVectorsInFlight][q % kVectorsInFlight][e];
      }
    }
    AK_UNROLL
    for (int j = 0; j < kVectorsInFlight; j++) {
      if (first + j < kVectors) store_vec(parts + (first + j) * kVectorPitch, sum[j]);
    }
  }
  // And back into the accumulators.
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const auto sum = load_vec<4>(parts + j * kVectorPitch);
    float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    AK_UNROLL
    for (int e = 0; e < 4; e++) d[e] = sum[e];
  }
  return true;
}

// ---- the kernel: barriers, then every warpgroup its role over all tiles of the block.

template <class T, Major kMajorA, Major kMajorB, bool kFloat, class Tile>
AK_KERNEL(Tile::kThreads, 1)
gemm_sm90_kernel(AK_PARAM(TensorMap) map_a, AK_PARAM(TensorMap) map_b, AK_PARAM(TensorMap) map_c,
                 AK_PARAM(TensorMap) map_z, AK_PARAM(TensorMap) map_beside, AK_PARAM(Args) args) {
  static_assert(!kFloat || Tile::kBoxes, "fp32 output goes through boxes of 64 columns");
  static_assert(shared_bytes<kFloat, Tile>() <= kSharedLimit, "the stages do not fit into shared memory");
  constexpr int kTurnBarrier = 1 + Tile::kConsumers;  // named barriers: one a consumer, then one for its turn

  // Barriers, before either block of the cluster uses them.
  Pipeline<kFloat, Tile> p;
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

  const int warpgroup = static_cast<uint32_t>(thread_index()) / kWarpgroupThreads;
  // The producer needs few registers, the consumers as many as they can get.
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers > 1) registers_decrease<Tile::kProducerRegisters>();
    if (thread_of_warpgroup() == 0) produce<kMajorA, kMajorB, Tile>(p, &map_a, &map_b, args);
  } else {
    if constexpr (Tile::kConsumers > 1) registers_increase<Tile::kConsumerRegisters>();
    const int consumer = warpgroup - 1, group = Tile::kPingpong ? 0 : consumer;
    const Epilogue& e = args.epilogue;
    uint32_t loaded_phases = 0;
    Scheduler<Tile> scheduler(args.schedule);
    bool others_turn = consumer == 1;
    if (Tile::kPingpong && others_turn) named_barrier_arrive(kTurnBarrier, 2 * kWarpgroupThreads);  // the first is free
    Work work;
    for (; scheduler.next(work); others_turn = !others_turn) {
      if constexpr (Tile::kPingpong) {  // pass over the other's tiles
        if (others_turn) {
          p.skip(work.last_step - work.first_step);
          continue;
        }
      }
      // What the epilogue reads comes while products are made, pingpong also the other's: into its boxes, if it is sure
      // to follow and no z is stored from there before it.
      const auto staging = [&] { return opaque(p.staging) + consumer * staging_bytes<kFloat, Tile>(); };
      const auto loaded = [&] { return opaque(p.loaded) + consumer * 16; };
      if constexpr (Tile::kTakesEpilogue && Tile::kBoxes) {
        if (args.reads && thread_of_warpgroup() == 0 && work.split == 0) {
          const Boxes<kFloat, Tile> boxes(args, work, consumer);
          boxes.prefetch(&map_beside);
          if (args.reads_early) boxes.first_loads(&map_beside, staging(), loaded());
        }
      }
      // Pingpong: until the other gives the tensor cores free.
      if constexpr (Tile::kPingpong) named_barrier(kTurnBarrier + consumer, 2 * kWarpgroupThreads);
      // The sums, and with a split k those of all parts.
      float acc[Tile::kSlicesM][Tile::kBlockN / 2];
      main_loop<T, kMajorA, kMajorB, Tile>(p, work, group, acc, [&] {
        if constexpr (Tile::kPingpong) {
          if (scheduler.more()) named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kWarpgroupThreads);
        }
      });
      if (work.n >= args.columns) continue;  // beside the last columns of C, only there for the other block of the pair
      if (args.schedule.splits > 1 &&
          !reduce_splits<Tile>(args.schedule, work, group, consumer, p.flags + 4 * consumer, acc))
        continue;
      // Out, through shared memory.
      const auto store = [&](const auto& change) {
        store_tile<T, kFloat, Tile>(acc, change, e.z.data ? &map_z : &map_c, staging(), consumer,
                                    work.m + group * Tile::kConsumerRows, work, args);
      };
      if (args.way.store == Store::kPlain) {
        store(AsItIs{});
      } else if (args.way.store == Store::kScaled) {
        store(Scaled{e.alpha});
      } else if (args.way.store == Store::kBias) {
        store(Biased<T>{reinterpret_cast<const T*>(e.bias.data), args.n});
      } else if (args.way.store == Store::kFloatBias) {
        store(Biased<float>{reinterpret_cast<const float*>(e.bias.data), args.n});
      } else if (args.way.store == Store::kWords) {
        store(Anything{e.alpha, e.bias.data, e.bias.type, args.n});
      }
      if constexpr (Tile::kTakesEpilogue) {
        if (args.way.finish == Finish::kElements) finish_elements<kFloat, Tile>(acc, p.staging, work, args);
        if constexpr (Tile::kBoxes) {
          if (args.way.finish != Finish::kBoxes) continue;
          const Boxes<kFloat, Tile> boxes(args, work, consumer);
          if (args.reads && !args.reads_early && thread_of_warpgroup() == 0)
            boxes.first_loads(&map_beside, staging(), loaded());
          const auto finish = [&](auto backward) {
            finish_boxes<T, kFloat, backward.value, Tile>(acc, boxes, &map_c, &map_beside, staging(), loaded(),
                                                          consumer, loaded_phases, args);
          };
          if (kFloat || !e.preact.data) {
            finish(std::false_type());
          } else {
            finish(std::true_type());
          }
        }
      }
    }
    if (thread_of_warpgroup() == 0) bulk_wait<0>();  // shared memory must live until the stores have read it
  }
  if constexpr (Tile::kCluster > 1) cluster_sync();  // and until the peer's last arrival
}

// ---- launch: schedule, tensor maps, shape of the grid, and the instance that serves a problem.

template <class Tile>
Schedule make_schedule(const GemmProblem& q, const Args& args, int splits, const GemmScratch& scratch, int clusters) {
  Schedule s{};
  s.tile_columns = args.tile_columns;
  const int rows = divide_up(q.m, Tile::kBlockM * Tile::kClusterM);
  const int columns = divide_up(args.columns, args.tile_columns * Tile::kClusterN);
  // What is outside the lines walked together is read once per group: the smaller of A and B, which may stay in L2.
  s.by_columns = q.n > q.m;
  s.lines = s.by_columns ? columns : rows;
  s.line_length = s.by_columns ? rows : columns;
  // All blocks together then work on about a square of C, whose rows and columns are the least to read; in equal
  // groups.
  const int tall = Tile::kBlockM * Tile::kClusterM, wide = Tile::kBlockN * Tile::kClusterN;
  const double shape = s.by_columns ? static_cast<double>(tall) / wide : static_cast<double>(wide) / tall;
  const int together = std::max(1, static_cast<int>(std::lround(std::sqrt(clusters * shape / splits))));
  s.raster_lines = divide_up(s.lines, divide_up(s.lines, together));
  s.splits = splits;
  s.k_steps = divide_up(q.k, kBlockK);
  s.k_steps_per_split = divide_up(s.k_steps, splits);
  s.work_count = rows * columns * q.batch * splits;
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
  Args args = arguments<T, kFloat, Tile>(q, output, splits);
  const bool halved = args.tile_columns < Tile::kBlockN;  // swiglu
  if (halved && Tile::kBlockN % 128 != 0) return {1, "gemm_sm90: swiglu takes tiles of 128 or 256 columns"};
  if (!Tile::kTakesEpilogue && args.way.finish != Finish::kNothing)
    return {1, "gemm_sm90: this tile takes a bias or alpha, no other epilogue, and a C with rows"};
  TensorMap map_a, map_b, map_c{}, map_z{}, map_beside{};
  Status status = map(&map_a, kMajorA, q.a, q.m, q.ld_a, q.batch_stride_a, Tile::kBlockM / Tile::kClusterN);
  if (!status.ok()) return status;
  status = map(&map_b, kMajorB, q.b, q.n, q.ld_b, q.batch_stride_b, Tile::kBlockN / (halved ? 2 : Tile::kClusterM));
  if (!status.ok()) return status;
  // A map of boxes of C, or of what lies like it; with swiglu it may have two halves, then one matrix each.
  const auto map_boxes = [&](TensorMap* to, const GemmValues& t, bool in_halves) {
    const uint64_t ld = size(t.row_stride), columns = size(args.columns);
    const uint64_t plane = in_halves ? columns : q.batch == 1 ? ld : size(t.batch_stride);
    return make_tensor_map(to, {t.data,
                                kFloat ? ElementType::kFloat32 : kType,
                                3,
                                {columns, size(q.m), in_halves ? 2 : size(q.batch)},
                                {ld, plane},
                                {kFloat ? 32u : 64u, 64, 1}});
  };
  const GemmEpilogue& e = q.epilogue;
  const bool boxes = args.way.finish == Finish::kBoxes, pairs = e.preact.data && e.activation == Activation::swiglu;
  if (boxes || (args.way.store != Store::kNothing && args.way.store != Store::kWords)) {
    status = map_boxes(&map_c, q.c, pairs);
    if (status.ok() && boxes && e.z.data) status = map_boxes(&map_z, e.z, halved);
    if (status.ok() && boxes && e.preact.data) status = map_boxes(&map_beside, e.preact, pairs);
    if (status.ok() && boxes && args.epilogue.residual.data)
      status = map_boxes(&map_beside, e.residual.data ? e.residual : q.c, false);
    if (!status.ok()) return status;
  }
  const int clusters = std::max(device_sm_count() / Tile::kCluster, 1);
  args.schedule = make_schedule<Tile>(q, args, splits, scratch, clusters);
  // No more blocks than the same number of rounds needs: the others would only draw power.
  const int rounds = divide_up(args.schedule.work_count, clusters);
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = divide_up(args.schedule.work_count, rounds) * Tile::kCluster,
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<kFloat, Tile>()),
                            .cluster = Tile::kCluster,
                            .overlap_previous = !scratch.memset,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajorA, kMajorB, kFloat, Tile>, config, map_a, map_b, map_c, map_z, map_beside,
                args);
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
  if (output == GemmOutput::kAccumulate && problem.epilogue.residual.data)
    return {1, "gemm_sm90: what is added to C takes no residual beside"};
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
