// gemm_sm90: C = A B on Hopper, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops against 2 (m k + k n) + 2 or 4 m n bytes. From a few hundred in every dimension on the tensor
// cores are the limit, and on a large product the power they draw. Everything below exists to keep them busy. Plan: a
// persistent grid; each block (or pair of blocks, a cluster) takes output tiles in turn. One warp, the producer, only
// asks the TMA unit to bring 64-wide slices of A and B into a ring of stages in shared memory; one to three
// warpgroups, the consumers, run wgmma straight from there, and each has a warp as assistant that tells it which tile
// comes next (gemm_sm90_producer.cuh). The accumulators leave through shared memory: rounded, in a
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
// The phases, from top to bottom: main loop, sum of the parts of a split k, the kernel that ties them together, and the
// launch.
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
#include "kernels/gemm_sm90_producer.cuh"
#include "kernels/gemm_sm90_store.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

// ---- main loop of a consumer: wgmma reads both operands from shared memory, one k step in flight while the next is
// issued. Cooperative tiles: the consumers share the rows of every tile. Pingpong tiles: the two consumers take the
// block's tiles in turn and hand the tensor cores to each other by named barriers, one's epilogue under the other's
// main loop; where in the ring a tile begins, each is told with the tile.

/// Descriptor of a stage of an operand that starts at `address`, the same in all lanes: asked of one, so that the
/// compiler knows, which else moves each half of each product's descriptors to the registers where wgmma takes them.
template <Major kMajor>
AK_DEVICE uint64_t stage_descriptor(uint32_t address) {
  return wgmma_descriptor(shuffle(address, 0), kMajor == Major::kK ? 16 : kSliceBytes, 1024);
}
/// What to add for slice number `slice` of 64 rows, number `k16` of k.
template <Major kMajor>
AK_DEVICE constexpr uint64_t slice_of_descriptor(int slice, int k16) {
  return (slice * kSliceBytes + k16 * (kMajor == Major::kK ? 32 : 2048)) >> 4;
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
  for (int step = 0; step < work.steps; step++) {
    const uint64_t a = stage_descriptor<kMajorA>(p.a + p.stage * Tile::kBytesA + group * Tile::kSlicesM * kSliceBytes);
    const uint64_t b = stage_descriptor<kMajorB>(p.b + p.stage * Tile::kBytesB);
    mbarrier_wait(p.full + 8 * p.stage, p.phase);
    wgmma_fence();
    AK_UNROLL
    for (int k16 = 0; k16 < kBlockK / 16; k16++) {
      AK_UNROLL
      for (int i = 0; i < Tile::kSlicesM; i++) {
        const bool accumulate = step != 0 || k16 != 0;
        wgmma<T, kMajorA, kMajorB>(acc[i], a + slice_of_descriptor<kMajorA>(i, k16),
                                   b + slice_of_descriptor<kMajorB>(0, k16), accumulate);
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
  static_assert(!kFloat || Tile::kFullBoxes, "fp32 output goes through boxes of 64 columns");
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
  // The producer and the assistants need few registers, the consumers as many as they can get.
  if (warpgroup == 0) {
    if constexpr (Tile::kConsumers > 1) registers_decrease<Tile::kProducerRegisters>();
    const int warp = warp_index();
    if (lane_index() != 0) {
      // one thread of each works
    } else if (warp == 0) {
      produce<kMajorA, kMajorB, Tile>(p, &map_a, &map_b, args);
    } else if (warp <= Tile::kConsumers) {
      assist(p, warp - 1, &map_c, &map_beside, args);
    }
  } else {
    if constexpr (Tile::kConsumers > 1) registers_increase<Tile::kConsumerRegisters>();
    const int consumer = warpgroup - 1, group = Tile::kPingpong ? 0 : consumer;
    const Epilogue& e = args.epilogue;
    if (Tile::kPingpong && consumer == 1)  // the first turn is free
      named_barrier_arrive(kTurnBarrier, 2 * kWarpgroupThreads);
    constexpr uint32_t kTaskPhase = 4;
    uint32_t phases = 0;  // of the barriers where this consumer waits: its two slots', then its tasks', a bit each
    for (;;) {
      const Task task = take_task(p, p.desk(consumer), (phases & kTaskPhase) != 0);
      phases ^= kTaskPhase;
      const Work& work = task.work;
      if (work.steps == 0) break;
      if constexpr (Tile::kPingpong) {  // until the other gives the tensor cores free
        named_barrier(kTurnBarrier + consumer, 2 * kWarpgroupThreads);
      }
      // The sums, and with a split k those of all parts.
      float acc[Tile::kSlicesM][Tile::kBlockN / 2];
      main_loop<T, kMajorA, kMajorB, Tile>(p, work, group, acc, [&] {
        if constexpr (Tile::kPingpong) {
          if (task.other) named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kWarpgroupThreads);
        }
      });
      const int row = work.m + group * Tile::kConsumerRows;
      if (row >= args.m || work.n >= args.columns) continue;  // beside C: there only for the others' rows or columns
      const auto ask = [&] {
        if (thread_of_warpgroup() == 0) mbarrier_arrive(p.desk(consumer).asked());
      };
      if (args.detour) {
        const bool last = args.schedule.splits == 1 ||
                          reduce_splits<Tile>(args.schedule, work, group, consumer, p.desk(consumer).last(), acc);
        if (Tile::kTakesEpilogue && args.asks) {
          ask();
          if (last && args.z_first) {
            mbarrier_wait(p.desk(consumer).ready(0), phases & 1);
            phases ^= 1;
          }
        }
        if (!last) continue;
      }
      // Out, through shared memory.
      const auto store = [&](const auto& change) {
        store_tile<T, kFloat, Tile>(acc, change, args.z_first ? &map_z : &map_c, p.staging_of(consumer), consumer, row,
                                    work, args);
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
        if (args.way.finish == Finish::kNothing) continue;
        if (args.way.finish == Finish::kElements) {
          finish_elements<kFloat, Tile>(acc, p.staging, work, args);
          continue;
        }
        if (args.z_first) {  // it has left the staging buffer when its store has read it, or all warps
          if (!Tile::kFullBoxes) publish_staging(consumer);
          if (thread_of_warpgroup() == 0) bulk_wait_read<0>();
          ask();
        }
        const Boxes<kFloat, Tile> boxes(args, work, consumer);
        const auto finish = [&](auto backward) {
          finish_boxes<T, kFloat, backward.value, Tile>(acc, boxes, p.staging_of(consumer), p.desk(consumer), phases,
                                                        args);
        };
        if (kFloat || !e.preact.data) {
          finish(std::false_type());
        } else {
          finish(std::true_type());
        }
      }
    }
    if (thread_of_warpgroup() == 0) bulk_wait<0>();  // shared memory must live until the stores have read it
  }
  warp_sync();                                       // one lane may have worked alone
  if constexpr (Tile::kCluster > 1) cluster_sync();  // shared memory must live until the peer's last arrival, too
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
                       {size(ld), size(batch_stride)},
                       {kBlockK, static_cast<uint32_t>(box_rows), 1}};
    if (major == Major::kMN) {
      std::swap(spec.size[0], spec.size[1]);
      spec.box[0] = 64;
      spec.box[1] = kBlockK;
    }
    if (one) spec.stride[1] = spec.stride[0] * spec.size[1];
    return make_tensor_map(to, spec);
  };
  Args args = arguments<T, kFloat, Tile>(q, output, splits);
  const bool halved = args.tile_columns < Tile::kBlockN;  // swiglu
  if (halved && Tile::kBlockN % 128 != 0) return {1, "gemm_sm90: swiglu takes tiles of 128 or 256 columns"};
  if (!Tile::kTakesEpilogue && args.way.finish != Finish::kNothing)
    return {1, "gemm_sm90: this tile takes a bias or alpha, no other epilogue, and a C with rows"};
  TensorMap map_a, map_b, map_c{}, map_z{}, map_beside{};
  Status status = map(&map_a, kMajorA, q.a, q.m, q.ld_a, q.batch_stride_a, Tile::kBlockM / Tile::kClusterN);
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  status = map(&map_b, kMajorB, q.b, q.n, q.ld_b, q.batch_stride_b, Tile::kBlockN / (halved ? 2 : Tile::kClusterM));
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  // A map of boxes of C, or of what lies like it; with swiglu it may have two halves, then one matrix each.
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
  const bool boxes = args.way.finish == Finish::kBoxes, pairs = e.preact.data && e.activation == Activation::swiglu;
  if (boxes || (args.way.store != Store::kNothing && args.way.store != Store::kWords)) {
    status = map_boxes(&map_c, q.c, pairs);
    if (status.ok() && boxes && e.z.data) status = map_boxes(&map_z, e.z, halved);
    if (status.ok() && boxes && e.preact.data) status = map_boxes(&map_beside, e.preact, pairs);
    if (status.ok() && boxes && args.epilogue.residual.data)
      status = map_boxes(&map_beside, e.residual.data ? e.residual : q.c, false);
    if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
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
  if (output == GemmOutput::kAccumulate && (problem.epilogue.residual.data || problem.epilogue.z.data))
    return {1, "gemm_sm90: what is added to C takes no residual and keeps no z beside"};
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
