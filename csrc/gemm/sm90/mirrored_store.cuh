// Store of a tile of a symmetric C, and of its mirror image.
//
// Work: per box of 64 x 64, one pass over 32 sums a thread, each rounded once; 2 x 8 KB through shared memory. Plan:
// the pairs of a box are staged twice, as they lie by stmatrix and transposed by stmatrix.trans, and TMA stores both
// boxes. A box on the diagonal takes its upper half from the transposed one, and is stored alone: so C is symmetric to
// the bit whichever way the tensor cores add up two mirrored elements. Boxes above the diagonal belong to their mirror
// images. Traps: both boxes take both slots of the staging buffer, so the next box waits until TMA has read them. Rows
// out of bounds are sums over zeros, which TMA clips in either box.
#pragma once
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int kPairsInBox = 64 * 64 / 2 / kWarpgroupThreads;  // per thread

/// This thread's pairs of the residual in a box, up to the diagonal; 0 elsewhere.
AK_DEVICE void load_lower_pairs(const Args& args, int batch, int row, int column, uint32_t (&pairs)[kPairsInBox]) {
  const int lane = lane_in_warp(), first = row + thread_in_warpgroup() / kWarpThreads * 16 + lane / 4;
  AK_UNROLL
  for (int i = 0; i < kPairsInBox; i++) {
    const int r = first + i % 2 * 8, c = column + i / 2 * 8 + lane % 4 * 2;
    const char* const at = address_in(args.epilogue.residual, batch, r, c);
    pairs[i] = r < args.m && c <= r ? load(reinterpret_cast<const uint32_t*>(at)) : 0u;
  }
}

/// Replaces the upper half of a staged box on the diagonal by that of its transpose, which is staged behind it.
AK_DEVICE void mirror_box(uint32_t staging) {
  const int row = thread_in_warpgroup() / 2, half = thread_in_warpgroup() % 2 * 4;
  AK_UNROLL
  for (int i = 0; i < 4; i++) {
    const int chunk = half + i, below = row + 1 - 8 * chunk;  // elements of the chunk that are not above the diagonal
    const uint32_t at = staging + box_offset(row, chunk);
    if (below >= 8) continue;
    auto own = load_shared_16(at);
    const auto turned = load_shared_16(at + kSliceBytes);
    AK_UNROLL
    for (int j = 0; j < 4; j++) {
      const uint32_t kept = below >= 2 * j + 2 ? 0xffffffffu : below == 2 * j + 1 ? 0xffffu : 0u;
      own[j] = (own[j] & kept) | (turned[j] & ~kept);
    }
    store_shared_16(at, own);
  }
}

/// Stores a consumer's accumulators, whose first row is `m`.
template <class T, class Tile>
AK_DEVICE void store_mirrored(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const TensorMap* map,
                              uint32_t staging, int consumer, int m, const Work& work, const Args& args) {
  const Epilogue& e = args.epilogue;
  const int thread = thread_in_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t own = lane_address<false, false>(staging, warp, lane);
  const uint32_t turned = staging + kSliceBytes + box_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  AK_UNROLL
  for (int slice = 0; slice < Tile::kSlicesM; slice++) {
    AK_UNROLL
    for (int part = 0; part < Tile::kBlockN / 64; part++) {
      const int row = m + slice * 64, column = work.n + part * 64;
      if (row >= args.m || column > row) continue;
      uint32_t pairs[kPairsInBox];
      if (e.residual.data) load_lower_pairs(args, work.batch, row, column, pairs);
      wait_for_staging(thread, consumer);
      AK_UNROLL
      for (int j = 0; j < 64; j += 16) {
        float v[8];
        AK_UNROLL
        for (int i = 0; i < 8; i++) v[i] = e.alpha * acc[slice][(part * 64 + j) / 2 + i];
        if (e.residual.data) {
          AK_UNROLL
          for (int i = 0; i < 4; i++) {
            float low, high;
            widen_pair<T>(pairs[j / 4 + i], low, high);
            v[2 * i] = fma(e.beta, low, v[2 * i]), v[2 * i + 1] = fma(e.beta, high, v[2 * i + 1]);
          }
        }
        if (row == column && j == warp * 16) {
          AK_UNROLL
          for (int i = 0; i < 8; i++) {  // of the pairs on the diagonal: their rows' blocks of 8 are their columns'
            if (i / 4 == i / 2 % 2 && lane / 4 == lane % 4 * 2 + i % 2) v[i] += e.diagonal;
          }
        }
        uint32_t r[4];
        AK_UNROLL
        for (int i = 0; i < 4; i++) r[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
        stmatrix_x4(advance_columns<false, false>(own, j), r);
        stmatrix_x4_trans(turned + j * 128, r);
      }
      if (row == column) {
        named_barrier(consumer + 1, kWarpgroupThreads);
        mirror_box(staging);
      }
      publish_staging(consumer);
      if (thread == 0) {
        tma_store(map, staging, column, row, work.batch);
        if (row != column) tma_store(map, staging + kSliceBytes, row, column, work.batch);
        bulk_commit();
      }
    }
  }
}

}  // namespace gemm
}  // namespace ak
