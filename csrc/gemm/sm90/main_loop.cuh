// Main loop of a consumer of gemm_sm90.
//
// Work: four wgmma per k step and slice of 64 rows. Plan: wgmma reads both operands from shared memory, with one k step
// in flight while the next is issued. Cooperative: the consumers share the rows of every tile. Pingpong: two consumers
// alternate tiles and hand the tensor cores to each other by named barriers, so that one's epilogue overlaps the
// other's main loop. A consumer learns a tile's first stage together with the tile. Traps: a stage is released one step
// after its wgmma were issued, since only then they are known to be complete.
#pragma once
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "device/wgmma.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

/// Layout of a stage of an operand of which a block loads kLines rows or columns: rows of a swizzle pattern are 64 of
/// k, or as many lines as a box is wide.
template <Major kMajor, int kLines>
struct StageLayout {
  static constexpr int kBoxWidth = gemm_sm90_box_width(kLines);
  static constexpr Swizzle kSwizzle = kMajor == Major::kK ? Swizzle::k128 : swizzle_of(kBoxWidth);
  static constexpr int kPattern = 8 * static_cast<int>(row_bytes(kSwizzle));

  /// Descriptor of the stage at `address`. The shuffle broadcasts from lane 0 so that the compiler sees a uniform
  /// value; otherwise it moves both halves of every descriptor to uniform registers for each wgmma.
  AK_DEVICE static uint64_t descriptor(uint32_t address) {
    return wgmma_descriptor(shuffle(address, 0), kMajor == Major::kK ? 16 : box_bytes(kBoxWidth), kPattern, kSwizzle);
  }
  /// Descriptor offset of the slice-th 64 rows and the k16-th 16 of k.
  AK_DEVICE static constexpr uint64_t offset(int slice, int k16) {
    return (slice * kSliceBytes + k16 * (kMajor == Major::kK ? 32 : 2 * kPattern)) >> 4;
  }
};

/// Accumulates the k steps of `work` into the first kSlices of `acc` and releases each stage once its wgmma are
/// complete. `group` selects the consumer's rows of the tile. Calls `all_issued()` after the last wgmma has been
/// issued.
template <class T, Major kMajorA, Major kMajorB, class Tile, int kSlices, class Pipeline, class AllIssued>
AK_DEVICE void main_loop(Pipeline& p, const Work& work, int group, float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2],
                         AllIssued all_issued) {
  using LayoutA = StageLayout<kMajorA, Tile::kBlockM / Tile::kClusterN>;
  using LayoutB = StageLayout<kMajorB, Tile::kBlockN / Tile::kClusterM>;
  const int thread = thread_in_warpgroup();
  auto release = [&](int stage) {
    if (thread < Tile::kCluster) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);
  };
  AK_UNROLL
  for (int i = 0; i < kSlices; i++) wgmma_pin(acc[i]);
  int previous = -1;  // stage whose wgmma may still be running
  const auto take_step = [&](bool first) {
    const uint64_t a = LayoutA::descriptor(p.a + p.stage * Tile::kBytesA + group * Tile::kSlicesM * kSliceBytes);
    const uint64_t b = LayoutB::descriptor(p.b + p.stage * Tile::kBytesB);
    mbarrier_wait(p.full + 8 * p.stage, p.phase);
    wgmma_fence();
    AK_UNROLL
    for (int k16 = 0; k16 < kBlockK / 16; k16++) {
      AK_UNROLL
      for (int i = 0; i < kSlices; i++) {
        const bool accumulate = Tile::kChained || !first || k16 != 0;
        wgmma<T, kMajorA, kMajorB>(acc[i], a + LayoutA::offset(i, k16), b + LayoutB::offset(0, k16), accumulate);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step is complete, this one stays in flight
    if (previous >= 0) release(previous);
    previous = p.stage;
    p.advance();
  };
  int step = 0;
  if constexpr (Tile::kChained) {
    // Apart: ptxas serializes wgmma in a loop whose accumulators anything else defines at its entry.
    take_step(true);
    step++;
  }
  for (; step < work.steps; step++) take_step(step == 0);
  all_issued();
  wgmma_wait<0>();
  if (Tile::kGrouping == Grouping::kNone || previous >= 0) release(previous);
  AK_UNROLL
  for (int i = 0; i < kSlices; i++) wgmma_pin(acc[i]);
  if (Tile::kGrouping != Grouping::kNone && previous < 0) {  // a sum of no terms
    AK_UNROLL
    for (int i = 0; i < kSlices; i++) {
      AK_UNROLL
      for (int j = 0; j < Tile::kBlockN / 2; j++) acc[i][j] = 0.0f;
    }
  }
}

/// Loads C into the accumulators: rows lane / 4 and 8 + lane / 4 of the warp's 16, columns 2 (lane % 4) and the next of
/// every 8, whole sectors of 32 bytes. The producer fills the ring meanwhile.
template <class Tile>
AK_DEVICE void start_from_c(float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const Work& work, int group,
                            const Args& args) {
  const int thread = thread_in_warpgroup(), lane = thread % kWarpThreads;
  const int row = work.m + group * Tile::kConsumerRows + thread / kWarpThreads * 16 + lane / 4;
  const int column = work.n + lane % 4 * 2;
  const bool pairs = args.path.direct == DirectStore::kIdentity;  // rows of C are aligned, of whole 16 bytes
  AK_UNROLL
  for (int i = 0; i < 2 * Tile::kSlicesM; i++) {
    const int r = row + i / 2 * 64 + i % 2 * 8;
    const char* line = address_in(args.epilogue.c, work.batch, r, column);
    AK_UNROLL
    for (int b = 0; b < Tile::kBlockN / 8; b++) {
      const int left = r < args.m ? args.columns - column - 8 * b : 0;
      float* d = acc[i / 2] + 4 * b + i % 2 * 2;
      if (pairs) {
        const auto v = left > 0 ? load_vec<2>(reinterpret_cast<const float*>(line + 32 * b)) : Vec<float, 2>{};
        d[0] = v[0], d[1] = v[1];
        continue;
      }
      AK_UNROLL
      for (int e = 0; e < 2; e++) {
        const char* at = line + (8 * b + e) * args.epilogue.c.column_bytes;
        d[e] = left > e ? load(reinterpret_cast<const float*>(at)) : 0.0f;
      }
    }
  }
}

}  // namespace gemm
}  // namespace ak
