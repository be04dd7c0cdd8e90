// gemm_sm90: C = A B on Hopper, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops against 2 (m k + k n) + 2 or 4 m n bytes. With every dimension above a few hundred the tensor
// cores are the limit, and for large products the power they draw. Plan: a persistent, warp-specialized grid; each
// block (or cluster of two) takes output tiles in turn. One producer warp issues TMA loads of 64-wide slices of A and B
// into a ring of stages in shared memory. One to three consumer warpgroups run wgmma on these stages; each has a
// scheduler warp that tells it which tile comes next (producer.cuh). The epilogue takes one of three routes. Identity,
// scale and bias are applied in registers and stored through shared memory, by TMA or, for widths that are no multiple
// of 64 or unaligned rows of C, by the warps (direct_store.cuh). Other epilogues run on TMA boxes in shared memory
// (epilogue_tma.cuh) or, if TMA cannot move C or an operand, element by element (epilogue_elementwise.cuh). The same
// code serves all four layouts: an operand that is contiguous along m or n is loaded in boxes of 64 x 64, or as wide
// as a tile of 16 or 32 columns, and its descriptors say so. The batch is the third dimension of every tensor map, so a
// tile never extends into the next matrix. Traps: a stage may be released only when the wgmma that read it is known to
// be complete, one k step after it was issued. In a cluster a stage is released to both blocks, since both write into
// it, and no block may exit before its peer's last arrival. Threads write the staging buffer through the generic proxy
// and TMA reads it through the async proxy: each writer fences, then all synchronize, then one stores.
//
// From top to bottom: split-k reduction, kernel, launch. The main loop is that of main_loop.cuh.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/mbarrier.cuh"
#include "device/registers.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/epilogue_elementwise.cuh"
#include "gemm/sm90/epilogue_tma.cuh"
#include "gemm/sm90/gemm.h"
#include "gemm/sm90/main_loop.cuh"
#include "gemm/sm90/mirrored_store.cuh"
#include "gemm/sm90/producer.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

// ---- split k: each part writes its accumulators to scratch in register order and increments a counter. The last to
// arrive adds all parts in the order of k, so the bits do not depend on the order of arrival.

/// True in the warpgroup that arrives last, which then holds the sum of all parts in `acc`; the others are done with
/// the tile. The parts are summed in scratch rather than in the accumulators, since registers cannot be indexed in a
/// loop: this costs one more write and read of a tile but no registers.
template <class Tile>
AK_DEVICE bool reduce_splits(const Schedule& s, const Work& work, int group, int consumer, uint32_t flag,
                             float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2]) {
  constexpr int kVectors = Tile::kAccumulators / 4;
  constexpr int kVectorsInFlight = 8, kPartsInFlight = 2;  // loads issued together
  constexpr int64_t kPartSize = static_cast<int64_t>(Tile::kBlockM) * Tile::kBlockN;
  constexpr int kVectorPitch = kWarpgroupThreads * 4;
  const int thread = thread_in_warpgroup();
  // Layout [tile][part][group][vector][thread][4]: a warp accesses 512 contiguous bytes.
  float* const parts = s.partials + work.tile * s.splits * kPartSize + group * (kPartSize / Tile::kGroups) + thread * 4;
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    store_vec(parts + work.split * kPartSize + j * kVectorPitch, Vec<float, 4>{{d[0], d[1], d[2], d[3]}});
  }
  // Thread 0 increments the counter and tells the others whether this part is the last.
  named_barrier(consumer + 1, kWarpgroupThreads);  // every thread's sums are ordered before thread 0's release
  if (thread == 0) {
    const uint32_t last = static_cast<uint32_t>(s.splits) - 1;
    store_shared_4(flag, atomic_count_acq_rel(s.counters + work.tile * Tile::kGroups + group, last) == last ? 1u : 0u);
  }
  named_barrier(consumer + 1, kWarpgroupThreads);
  if (shared_at<uint32_t>(flag)[0] == 0u) return false;
  // Sum all parts into the first one.
  AK_NO_UNROLL
  for (int first = 0; first < kVectors; first += kVectorsInFlight) {
    Vec<float, 4> sum[kVectorsInFlight] = {};
    AK_NO_UNROLL
    for (int split = 0; split < s.splits; split += kPartsInFlight) {
      Vec<float, 4> part[kPartsInFlight][kVectorsInFlight];
      AK_UNROLL
      for (int q = 0; q < kPartsInFlight * kVectorsInFlight; q++) {  // issue all loads before the first sum
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
  // Reload the accumulators.
  AK_UNROLL
  for (int j = 0; j < kVectors; j++) {
    const auto sum = load_vec<4>(parts + j * kVectorPitch);
    float* d = acc[4 * j / (Tile::kBlockN / 2)] + 4 * j % (Tile::kBlockN / 2);
    AK_UNROLL
    for (int e = 0; e < 4; e++) d[e] = sum[e];
  }
  return true;
}

// ---- kernel: barrier setup, then each warpgroup runs its role over all tiles of the block.

template <class T, Major kMajorA, Major kMajorB, bool kFloat, class Tile>
AK_KERNEL(Tile::kThreads, 1)
gemm_sm90_kernel(AK_PARAM(TensorMap) map_a, AK_PARAM(TensorMap) map_b, AK_PARAM(TensorMap) map_c,
                 AK_PARAM(TensorMap) map_z, AK_PARAM(TensorMap) map_aux, AK_PARAM(Args) args) {
  static_assert(!kFloat || Tile::kFullBoxes, "fp32 output needs tiles of a multiple of 64 columns");
  static_assert(shared_bytes<kFloat, Tile>() <= kSharedLimit, "the stages do not fit into shared memory");
  constexpr int kTurnBarrier =
      1 + Tile::kConsumers;  // named barriers: one per consumer, then one for each consumer's turn

  // Barriers must be initialized before either block of the cluster uses them.
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
  wait_for_previous_kernel();  // the setup above overlaps the previous kernel
  allow_next_kernel();         // its blocks start as the blocks of this kernel exit

  const int warpgroup = static_cast<uint32_t>(thread_index()) / kWarpgroupThreads;
  // Producer and scheduler warps need few registers, consumers as many as possible.
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers > 1) registers_decrease<Tile::kProducerRegisters>();
    const int warp = warp_index();
    if (lane_index() != 0) {
      // one thread of each warp works
    } else if (warp == 0) {
      produce<kMajorA, kMajorB, Tile>(p, {&map_a, &map_z, &map_aux}, &map_b, args);
    } else if (warp <= Tile::kConsumers) {
      run_scheduler_warp(p, &map_c, &map_aux, args);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) registers_increase<Tile::kConsumerRegisters>();
    const int consumer = warpgroup - 1, group = Tile::kPingpong ? 0 : consumer;
    const Epilogue& e = args.epilogue;
    if (Tile::kPingpong && consumer == 1)  // the first turn is free
      named_barrier_arrive(kTurnBarrier, 2 * kWarpgroupThreads);
    constexpr uint32_t kWorkPhase = 4, kTookTurn = 8;
    uint32_t phases = 0;  // phase bits of the barriers this consumer waits on: two slots, then work_full
    for (;;) {
      const NextWork next = take_work(p, p.mailbox(consumer), (phases & kWorkPhase) != 0);
      phases ^= kWorkPhase;
      const Work& work = next.work;
      if constexpr (Tile::kGrouping != Grouping::kNone && Tile::kPingpong) {
        // A block may have no tile: then the first turn, which was free, is taken for nothing.
        const bool first = (phases & kTookTurn) == 0;
        if (work.steps == Tile::kEndMark && first && consumer == 0) named_barrier(kTurnBarrier, 2 * kWarpgroupThreads);
        phases |= kTookTurn;
      }
      if (work.steps == Tile::kEndMark) break;
      float acc[Tile::kSlicesM][Tile::kBlockN / 2];
      if constexpr (Tile::kChained) start_from_c<Tile>(acc, work, group, args);
      if constexpr (Tile::kPingpong) {  // until the other consumer hands over the tensor cores
        named_barrier(kTurnBarrier + consumer, 2 * kWarpgroupThreads);
      }
      const auto hand_over = [&] {
        if constexpr (Tile::kPingpong) {
          if (next.other_follows) named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kWarpgroupThreads);
        }
      };
      if (has_lone_slice<Tile>(work)) {
        if constexpr (Tile::kRowGroups) main_loop<T, kMajorA, kMajorB, Tile, 1>(p, work, group, acc, hand_over);
      } else {
        main_loop<T, kMajorA, kMajorB, Tile, Tile::kSlicesM>(p, work, group, acc, hand_over);
      }
      const int row = work.m + group * Tile::kConsumerRows;
      // Out of bounds; another consumer or the cluster peer still needs this tile's stages.
      if (row >= end_of_rows<Tile>(args, work) || work.n >= args.columns) continue;
      if constexpr (Tile::kTriangular) {
        const MirroredMaps maps{&map_c, &map_z, &map_aux};
        store_mirrored<T, Tile>(acc, maps, p.staging_of(consumer), consumer, row, work, args);
        continue;
      }
      const auto request_slots = [&] {
        if (thread_in_warpgroup() == 0) mbarrier_arrive(p.mailbox(consumer).slot_requested());
      };
      if (args.has_slow_exit) {
        const bool last =
            Tile::kGrouping != Grouping::kNone || args.schedule.splits == 1 ||
            reduce_splits<Tile>(args.schedule, work, group, consumer, p.mailbox(consumer).is_last_split(), acc);
        if (Tile::kTakesEpilogue && args.needs_slot_request) {
          request_slots();
          if (last && args.stores_z_first) {
            mbarrier_wait(p.mailbox(consumer).slot_ready(0), phases & 1);
            phases ^= 1;
          }
        }
        if (!last) continue;
      }
      const char* const bias = bias_of_tile<Tile>(args, work.batch);
      const auto store = [&](const auto& op) {
        store_tile<T, kFloat, Tile>(acc, op, args.stores_z_first ? &map_z : &map_c, p.staging_of(consumer), consumer,
                                    row, work, args);
      };
      if (args.path.direct == DirectStore::kIdentity) {
        store(Identity{});
      } else if (args.path.direct == DirectStore::kScaled) {
        store(Scale{e.alpha});
      } else if (args.path.direct == DirectStore::kBias) {
        store(AddBias<T>{reinterpret_cast<const T*>(bias), bias || !Tile::kRowGroups ? args.n : 0});
      } else if (args.path.direct == DirectStore::kFloatBias) {
        store(AddBias<float>{reinterpret_cast<const float*>(bias), bias || !Tile::kRowGroups ? args.n : 0});
      } else if (args.path.direct == DirectStore::kUnaligned) {
        store(ScaleAddBias{e.alpha, bias, e.bias.type, args.n});
      }
      if constexpr (Tile::kTakesEpilogue) {
        if (args.path.fused == FusedEpilogue::kNone) continue;
        if (args.path.fused == FusedEpilogue::kElementwise) {
          run_elementwise_epilogue<kFloat, Tile>(acc, p.staging, work, args);
          continue;
        }
        if constexpr (Tile::kTakesBoxes) {
          if (args.stores_z_first) {  // the slots are free once z's store, or all warps, have read them
            if (!Tile::kFullBoxes) publish_staging(consumer);
            if (thread_in_warpgroup() == 0) bulk_wait_read<0>();
            request_slots();
          }
          const TileBoxes<kFloat, Tile> boxes(args, work, consumer);
          with_activation(e.activation, [&](auto activation) {
            const auto finish = [&](auto backward) {
              run_tma_epilogue<T, kFloat, backward.value, activation.value, Tile>(acc, boxes, p.staging_of(consumer),
                                                                                  p.mailbox(consumer), phases, args);
            };
            if (kFloat || !e.preact.data) {
              finish(std::false_type());
            } else if constexpr (!Tile::kRowGroups) {
              finish(std::true_type());
            }
          });
        }
      }
    }
    if (thread_in_warpgroup() == 0) bulk_wait<0>();  // shared memory must outlive the stores' reads
  }
  warp_sync();                                       // reconverge: one lane may have worked alone
  if constexpr (Tile::kCluster > 1) cluster_sync();  // shared memory must outlive the peer's last arrival
}

// ---- launch: schedule, tensor maps, grid shape and choice of the kernel instance.

template <class Tile>
Schedule make_schedule(const GemmProblem& q, const Args& args, int splits, const GemmScratch& scratch, int clusters) {
  Schedule s{};
  s.tile_columns = args.tile_columns;
  const int rows = divide_up(q.m, Tile::kBlockM * Tile::kClusterM);
  const int columns = divide_up(args.columns, args.tile_columns * Tile::kClusterN);
  // Each group of lines rereads the operand across it: make that the smaller of A and B, which may stay in L2.
  s.by_columns = q.n > q.m;
  s.lines = s.by_columns ? columns : rows;
  s.line_length = s.by_columns ? rows : columns;
  s.tiles = rows * columns;
  // Concurrent blocks cover about a square of C, which minimizes the slices of A and B they read. Groups are equal.
  const int tall = Tile::kBlockM * Tile::kClusterM, wide = Tile::kBlockN * Tile::kClusterN;
  const double shape = s.by_columns ? static_cast<double>(tall) / wide : static_cast<double>(wide) / tall;
  const int together = std::max(1, static_cast<int>(std::lround(std::sqrt(clusters * shape / splits))));
  s.raster_lines = divide_up(s.lines, divide_up(s.lines, together));
  s.splits = splits;
  s.k_steps = divide_up(q.k, kBlockK);
  s.k_steps_per_split = divide_up(s.k_steps, splits);
  s.work_count = rows * columns * q.batch * splits;
  // No more blocks than this number of rounds needs: idle blocks would only draw power.
  s.clusters = divide_up(s.work_count, divide_up(s.work_count, clusters));
  s.batch_a = q.batch_stride_a != 0;
  s.batch_b = q.batch_stride_b != 0;
  s.partials = scratch.partials;
  s.counters = scratch.counters;
  return s;
}

/// Map of all matrices of an operand's batch, or of the one they share: `rows` rows of A or columns of B, in boxes of
/// `box_rows`.
template <class T>
Status operand_map(TensorMap* to, const GemmProblem& q, Major major, const void* p, int rows, int64_t ld,
                   int64_t batch_stride, int box_rows) {
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  const bool one = batch_stride == 0;
  TensorMapSpec spec{p,
                     kType,
                     3,
                     {size(q.k), size(rows), one ? 1 : size(q.batch)},
                     {size(ld), size(batch_stride)},
                     {kBlockK, static_cast<uint32_t>(box_rows), 1}};
  if (major == Major::kMN) {
    std::swap(spec.size[0], spec.size[1]);
    const int width = gemm_sm90_box_width(box_rows);
    spec.box[0] = static_cast<uint32_t>(width);
    spec.box[1] = kBlockK;
    spec.swizzle = swizzle_of(width);
  }
  if (one) spec.stride[1] = spec.stride[0] * spec.size[1];
  return make_tensor_map(to, spec);
}

/// Maps of the matrices of A, each clipped at its own end.
template <class T>
Status maps_of_a(std::initializer_list<TensorMap*> to, const GemmProblem& q, Major major, int box_rows) {
  GemmSegment part{q.a, 0, q.ld_a};
  const GemmSegment* next = q.more_a;
  for (TensorMap* map : to) {
    const bool last = next == std::end(q.more_a) || !next->data;
    GemmProblem alone = q;
    int& length = major == Major::kK ? alone.k : alone.m;
    length = (last ? length : next->begin) - part.begin;
    const Status status = operand_map<T>(map, alone, major, part.data, alone.m, part.ld, q.batch_stride_a, box_rows);
    if (last || !status.ok()) return status;
    part = *next++;
  }
  return {};
}

/// Makes the tensor maps and launches. kFloat: C is fp32.
template <class T, Major kMajorA, Major kMajorB, bool kFloat, class Tile>
Status launch_gemm(const GemmProblem& q, int splits, const GemmScratch& scratch, Stream stream) {
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  Args args = arguments<kFloat, Tile>(q, splits);
  const bool halved = args.tile_columns < Tile::kBlockN;  // swiglu
  if (halved && Tile::kBlockN % 128 != 0) return {1, "gemm_sm90: swiglu takes tiles of 128 or 256 columns"};
  if (!Tile::kTakesEpilogue && args.path.fused != FusedEpilogue::kNone)
    return {1, "gemm_sm90: this tile takes a bias or alpha, no other epilogue, and a C with rows"};
  TensorMap map_a, map_b, map_c{}, map_z{}, map_aux{};
  Status status = maps_of_a<T>({&map_a, &map_z, &map_aux}, q, kMajorA, Tile::kBlockM / Tile::kClusterN);
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  status = operand_map<T>(&map_b, q, kMajorB, q.b, q.n, q.ld_b, q.batch_stride_b,
                          Tile::kBlockN / (halved ? 2 : Tile::kClusterM));
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  // Map of C or of a tensor of its shape. With swiglu its two halves may be two matrices of the map.
  const auto map_boxes = [&](TensorMap* to, const GemmValues& t, bool in_halves) {
    const uint64_t ld = size(t.row_stride), columns = size(args.columns);
    const bool one = !in_halves && (q.batch == 1 || t.batch_stride == 0);
    const uint64_t plane = in_halves ? columns : one ? ld * size(q.m) : size(t.batch_stride);
    return make_tensor_map(to, {t.data,
                                kFloat ? ElementType::kFloat32 : kType,
                                3,
                                {columns, size(q.m),
                                 in_halves ? 2
                                 : one     ? 1
                                           : size(q.batch)},
                                {ld, plane},
                                {kFloat ? 32u : static_cast<uint32_t>(Tile::kBoxColumns), 64, 1},
                                Tile::kFullBoxes ? Swizzle::k128 : Swizzle::k32});
  };
  const GemmEpilogue& e = q.epilogue;
  const bool boxes = args.path.fused == FusedEpilogue::kTma,
             pairs = e.preact.data && e.activation == Activation::swiglu;
  if (boxes || (args.path.direct != DirectStore::kNone && args.path.direct != DirectStore::kUnaligned)) {
    status = map_boxes(&map_c, q.c, pairs);
    if (status.ok() && boxes && e.z.data) status = map_boxes(&map_z, e.z, halved);
    if (status.ok() && boxes && e.preact.data) status = map_boxes(&map_aux, e.preact, pairs);
    if (status.ok() && boxes && args.epilogue.residual.data)
      status = map_boxes(&map_aux, e.residual.data ? e.residual : q.c, false);
    if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  }
  const int clusters = std::max(device_sm_count() / Tile::kCluster, 1);
  args.schedule = make_schedule<Tile>(q, args, splits, scratch, clusters);
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = args.schedule.clusters * Tile::kCluster,
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<kFloat, Tile>()),
                            .cluster = Tile::kCluster,
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajorA, kMajorB, kFloat, Tile>, config, map_a, map_b, map_c, map_z, map_aux, args);
}

/// Tile kIndex with kStages stages, and the number of stages that fit into shared memory.
template <int kIndex, int kStages>
using StagedTile = Tile<kGemmTiles[kIndex].m, kGemmTiles[kIndex].n, kStages,
                        kGemmTiles[kIndex].cluster_m * kGemmTiles[kIndex].cluster_n, kGemmTiles[kIndex].consumers,
                        kGemmTiles[kIndex].pingpong, (kGemmTiles[kIndex].cluster_n > 1)>;
template <int kIndex, bool kFloat>
constexpr int stages() {
  constexpr int kTwo = shared_bytes<kFloat, StagedTile<kIndex, 2>>(),
                kThree = shared_bytes<kFloat, StagedTile<kIndex, 3>>();
  return 2 + (kSharedLimit - kTwo) / (kThree - kTwo);
}

/// launch_gemm with tile config.tile, searched from kIndex to kEnd - 1.
template <class T, Major kMajorA, Major kMajorB, int kIndex, int kEnd>
Status with_tile(const GemmProblem& q, const GemmSm90Config& config, const GemmScratch& scratch, Stream stream) {
  constexpr GemmTile kTile = kGemmTiles[kIndex];
  if (config.tile != kIndex) {
    if constexpr (kIndex + 1 < kEnd)
      return with_tile<T, kMajorA, kMajorB, kIndex + 1, kEnd>(q, config, scratch, stream);
    return {1, "gemm_sm90: there is no such tile"};
  }
  if constexpr (gemm_sm90_takes_layout(kTile, kMajorA == Major::kMN, kMajorB == Major::kMN)) {
    if constexpr (kTile.n % 64 == 0) {  // other widths store fp32 element by element
      if (q.c.type == DType::kFloat32) {
        return launch_gemm<T, kMajorA, kMajorB, true, StagedTile<kIndex, stages<kIndex, true>()>>(q, config.splits,
                                                                                                  scratch, stream);
      }
    }
    return launch_gemm<T, kMajorA, kMajorB, false, StagedTile<kIndex, stages<kIndex, false>()>>(q, config.splits,
                                                                                                scratch, stream);
  }
  return {1, "gemm_sm90: this tile does not take operands of this layout"};
}

/// gemm_sm90 restricted to tiles kFirst to kEnd - 1.
template <class T, int kFirst, int kEnd>
Status run(const GemmProblem& problem, const GemmSm90Config& config, const GemmScratch& scratch, Stream stream) {
  if (problem.accumulate && (problem.epilogue.residual.data || problem.epilogue.z.data))
    return {1, "gemm_sm90: accumulation into C takes neither a residual nor z"};
  if (const char* why = gemm_sm90_refuses(problem, config)) return {1, why};
  GemmSm90Config c = config;
  c.splits = gemm_sm90_splits(problem.k, config.splits);
  if (c.splits > 1 && (scratch.partials == nullptr || scratch.counters == nullptr))
    return {1, "gemm_sm90: a split product needs scratch"};
  const GemmProblem q = c.swapped ? swapped(problem) : problem;
  constexpr Major kK = Major::kK, kMN = Major::kMN;
  if (q.m_major_a) {
    return q.n_major_b ? with_tile<T, kMN, kMN, kFirst, kEnd>(q, c, scratch, stream)
                       : with_tile<T, kMN, kK, kFirst, kEnd>(q, c, scratch, stream);
  }
  return q.n_major_b ? with_tile<T, kK, kMN, kFirst, kEnd>(q, c, scratch, stream)
                     : with_tile<T, kK, kK, kFirst, kEnd>(q, c, scratch, stream);
}

}  // namespace gemm

template <class T>
Status gemm_sm90(const GemmProblem& problem, const GemmSm90Config& config, const GemmScratch& scratch, Stream stream) {
  if (problem.symmetric) return gemm_sm90_symmetric<T>(problem, config.tile, stream);
  if (is_chained(problem)) return gemm_sm90_chained<T>(problem, config, stream);
  return gemm::run<T, 0, kGemmTileCount>(problem, config, scratch, stream);
}

}  // namespace ak
