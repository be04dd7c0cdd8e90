// gemm_sm80: C = A B with mma.sync, fp16 or bf16 in, fp32 accumulate.
//
// Work: 2 m n k flops. A k step of 32 of a 128 x 128 tile is 2^20 flops and 16 KB from L2. It takes the tensor cores of
// an A100 512 cycles (2,048 flops per cycle and SM), and mma.sync on Hopper about 400 (65 % of wgmma,
// arXiv:2402.13499). So the tile needs 32 or 41 bytes per cycle and SM from L2, and a 128 x 256 tile 24 or 31. Shared
// memory moves 128 bytes per cycle: 16 KB in and, with warp tiles of 64 x 64, every operand out twice, 32 KB, in 384
// cycles. With 64 x 32 it would be the limit. A shifted operand (operand.cuh) is read and written once more, which for
// two operands makes 700 cycles: unaligned rows cost about a third of the speed. Plan: one tile per block. Its threads
// keep a ring of k steps in flight with cp.async. Each warp loads its next fragments with ldmatrix while the tensor
// cores work on the current ones, with one barrier per step. Tiles are rasterized in groups of eight rows, so that
// concurrent blocks share operands in L2. With split k, blocks write their sums to scratch in register order, and the
// last to arrive adds them in the order of the splits. The epilogue runs in registers, on 16 rows and 2 x 16 columns at
// a time, and results are stored through shared memory in whole rows. A tile's columns are two halves, and so are a
// warp's: with swiglu they are gate and value, so that both are in one thread. Layouts, alignments, epilogues and
// outputs are run-time parameters, to keep the number of instances small. Traps: shifted operands must arrive a step
// earlier, so fewer copies may be in flight. A copy fills the stage read in the previous step, so it must follow the
// barrier. The epilogue reuses the ring, so no warp may still read fragments. Nearly all registers are in use:
// addresses of copies are recomputed (opaque), or ptxas keeps them during the loop and spills.
#pragma once
#include "device/atomic.cuh"
#include "device/block.cuh"
#include "device/launch.cuh"
#include "gemm/sm80/output.cuh"
#include "gemm/sm80/tile.cuh"

namespace ak {
namespace mma_gemm {

/// copy_wait for a run-time number of groups.
AK_DEVICE void wait_for_copies(int newer) {
  static_assert(kMaxStages - 2 <= 2, "the cases below");
  if (newer == 0) {
    copy_wait<0>();
  } else if (newer == 1) {
    copy_wait<1>();
  } else {
    copy_wait<2>();
  }
}

/// Main loop: accumulates this warp's part of the tile.
template <class T, class Tile>
AK_DEVICE void multiply(const Args& args, const Work& work, float (&acc)[Tile::kChunks][2][2][4]) {
  constexpr int kBlocksM = Tile::kWarpM / 16, kPairs = Tile::kWarpN / 16, kHalf = Tile::kBlockN / 2;
  const int warp_m = warp_index() % Tile::kWarpsM * Tile::kWarpM;
  const int warp_n = warp_index() / Tile::kWarpsM * (Tile::kWarpN / 2);  // in each half
  const int middle = work.m + Tile::kBlockM / 2, second = work.n + args.second_half, m = args.finish.m;
  const Rows rows{{work.m, middle}, {m, m}}, columns{{work.n, second}, {args.columns, args.finish.n}};
  Operand<Tile::kBlockM, Tile::kThreads> a(args.a, work.batch, rows, work.k, work.k_end);
  Operand<Tile::kBlockN, Tile::kThreads> b(args.b, work.batch, columns, work.k, work.k_end);
  const FragmentAddress<true> address_a(warp_m, args.a);
  const FragmentAddress<false> address_b(warp_n, args.b);
  const int bytes_a = Tile::kBlockM * strip_pitch(args.a.path);
  const int stage_bytes = bytes_a + Tile::kBlockN * strip_pitch(args.b.path);
  const bool shifted = a.shifted() || b.shifted();
  const int newer = args.stages - (shifted ? 3 : 2);  // steps that may still be in flight at a barrier
  const uint32_t ring = dynamic_shared(), ring_end = ring + args.stages * stage_bytes;

  const auto copy = [&](int k, uint32_t stage) {
    if (k < work.k_end) {
      a.copy(stage, k);
      b.copy(stage + bytes_a, k);
    }
    copy_commit();  // also if empty, so that groups count steps
  };
  const auto shift = [&](uint32_t stage) {
    if (a.shifted()) a.shift(stage);
    if (b.shifted()) b.shift(stage + bytes_a);
  };
  uint32_t from_a[2][kBlocksM][4], from_b[2][4];  // double-buffered
  const auto load_a = [&](uint32_t stage, int k16, int i) { address_a.load(from_a[k16][i], stage, 16 * i, k16); };
  const auto load_b = [&](uint32_t stage, int k16, int q) {
    address_b.load(from_b[q % 2], stage + bytes_a, q / Tile::kParts * kHalf + q % Tile::kParts * 16, k16);
  };

  AK_NO_UNROLL
  for (int step = 0; step < args.stages - 1; step++) copy(work.k + step * kBlockK, ring + step * stage_bytes);
  wait_for_copies(newer);
  block_sync();
  if (shifted) {
    shift(ring);
    block_sync();
  }
  AK_UNROLL
  for (int i = 0; i < kBlocksM; i++) load_a(ring, 0, i);
  load_b(ring, 0, 0);
  uint32_t stage = ring, fill = ring_end - stage_bytes;  // current stage; stage to fill next, which was current before
  AK_NO_UNROLL
  for (int k = work.k; k < work.k_end; k += kBlockK) {
    const uint32_t next = stage + stage_bytes == ring_end ? ring : stage + stage_bytes;
    const bool last = k + kBlockK >= work.k_end;
    copy(k + (args.stages - 1) * kBlockK, fill);
    if (shifted && !last) shift(next);
    AK_UNROLL
    for (int part = 0; part < 2 * kPairs; part++) {  // 16 columns by 16 of k
      const int k16 = part / kPairs, q = part % kPairs;
      if (part + 1 < 2 * kPairs) {
        if (k16 == 0) {
          AK_UNROLL
          for (int i = q; i < kBlocksM; i += kPairs) load_a(stage, 1, i);
        }
        load_b(stage, (part + 1) / kPairs, (part + 1) % kPairs);
      } else if (!last) {
        wait_for_copies(newer);
        block_sync();  // the next stage has arrived, and no warp reads the current one any more
        AK_UNROLL
        for (int i = 0; i < kBlocksM; i++) load_a(next, 0, i);
        load_b(next, 0, 0);
      }
      const auto& r = from_b[q % 2];
      AK_UNROLL
      for (int i = 0; i < kBlocksM; i++) {
        auto& sums = acc[i * Tile::kParts + q % Tile::kParts][q / Tile::kParts];
        mma_m16n8k16<T>(sums[0], from_a[k16][i], {r[0], r[1]});
        mma_m16n8k16<T>(sums[1], from_a[k16][i], {r[2], r[3]});
      }
    }
    fill = stage;
    stage = next;
  }
  copy_wait<0>();
}

/// Split k: writes this part's sums to scratch. True in the block that arrives last, which then holds the sums of all
/// parts in `acc`.
template <class Tile>
AK_DEVICE bool combine_splits(const Args& args, const Work& work, float (&acc)[Tile::kChunks][2][2][4]) {
  constexpr int kVectors = Tile::kChunks * 4;  // per thread
  constexpr int kAtOnce = 8;                   // loads issued together
  constexpr int64_t kPart = Tile::kBlockM * Tile::kBlockN;
  // Layout [split][vector][thread][4]: a warp accesses 512 contiguous bytes.
  float* const mine = args.partials + work.tile * args.splits * kPart + thread_index() * 4;
  const auto sums = [&](int v) -> float (&)[4] { return acc[v / 4][v / 2 % 2][v % 2]; };
  AK_UNROLL
  for (int v = 0; v < kVectors; v++) {
    const float (&d)[4] = sums(v);
    store_vec(mine + work.split * kPart + v * (Tile::kThreads * 4), Vec<float, 4>{{d[0], d[1], d[2], d[3]}});
  }
  const auto is_last = shared_at<uint32_t>(dynamic_shared());
  block_sync();  // every thread's part is ordered before thread 0's release, and the ring is free
  if (thread_index() == 0) {
    const uint32_t others = static_cast<uint32_t>(args.splits) - 1;
    is_last[0] = atomic_count_acq_rel(args.counters + work.tile, others) == others ? 1u : 0u;
  }
  block_sync();
  if (is_last[0] == 0u) return false;
  AK_UNROLL
  for (int first = 0; first < kVectors; first += kAtOnce) {
    AK_NO_UNROLL
    for (int split = 0; split < args.splits; split++) {
      Vec<float, 4> part[kAtOnce];
      AK_UNROLL
      for (int i = 0; i < kAtOnce; i++) {
        part[i] = load_vec<4, Cache::kStreaming>(mine + split * kPart + (first + i) * (Tile::kThreads * 4));
      }
      AK_UNROLL
      for (int i = 0; i < 4 * kAtOnce; i++) {
        float& sum = sums(first + i / 4)[i % 4];
        sum = split == 0 ? part[i / 4][i % 4] : sum + part[i / 4][i % 4];
      }
    }
  }
  return true;
}

template <class T, class Tile>
AK_KERNEL(Tile::kThreads, Tile::kBlocks)
gemm_sm80_kernel(AK_PARAM(Args) args) {
  const Work work = work_of_block<Tile>(args);
  float acc[Tile::kChunks][2][2][4] = {};
  if constexpr (Tile::kChained) {
    const Output<Tile> output(args, work);
    AK_UNROLL
    for (int c = 0; c < Tile::kChunks; c++) load_chunk(args.finish, output.chunk(c), acc[c]);
  }
  multiply<T, Tile>(args, work, acc);
  if (args.splits > 1 && !combine_splits<Tile>(args, work, acc)) return;
  finish_tile<Tile>(args, work, acc);
}

}  // namespace mma_gemm
}  // namespace ak
