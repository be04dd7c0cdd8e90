// Store of a tile of a symmetric C, and of its mirror image.
//
// Work: per box of 64 x 64, one pass over 32 sums a thread, each rounded once; 2 x 8 KB through shared memory. Plan:
// the pairs of a box are staged twice, as they are by stmatrix and transposed by stmatrix.trans, and TMA stores both
// boxes. The columns of a tile beyond a multiple of 64 come in boxes of 16. Boxes above the diagonal belong to their
// mirror images. From boxes across the diagonal the threads store what lies below it, and its mirror image, in chunks
// of 8 elements; a chunk on the diagonal takes its upper elements from the transposed box. So every element is stored
// once, and C is symmetric to the bit whichever way the tensor cores add up two mirrored elements. Traps: both boxes
// take both slots of the staging buffer, so the next box waits until TMA and the threads have read them. Rows out of
// bounds are sums over zeros, which TMA clips in either box.
#pragma once
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int kNarrowColumns = 16;

/// Maps of C by the boxes they store.
struct MirroredMaps {
  const TensorMap* square;  ///< 64 x 64
  const TensorMap* tall;    ///< 64 x kNarrowColumns
  const TensorMap* flat;    ///< its mirror image
};

/// This thread's pairs of the residual in a box, up to the diagonal; 0 elsewhere.
template <int kPairs>
AK_DEVICE void load_lower_pairs(const Args& args, int batch, int row, int column, uint32_t (&pairs)[kPairs]) {
  const int lane = lane_in_warp(), first = row + thread_in_warpgroup() / kWarpThreads * 16 + lane / 4;
  AK_UNROLL
  for (int i = 0; i < kPairs; i++) {
    const int r = first + i % 2 * 8, c = column + i / 2 * 8 + lane % 4 * 2;
    const char* const at = address_in(args.epilogue.residual, batch, r, c);
    pairs[i] = r < args.m && c <= r ? load(reinterpret_cast<const uint32_t*>(at)) : 0u;
  }
}

/// A chunk of 8 elements across the diagonal: the first `below` of its own, the others of its mirror image.
AK_DEVICE Vec<uint32_t, 4> mirrored_chunk(Vec<uint32_t, 4> own, const Vec<uint32_t, 4>& mirror, int below) {
  AK_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint32_t kept = below >= 2 * j + 2 ? 0xffffffffu : below == 2 * j + 1 ? 0xffffu : 0u;
    own[j] = (own[j] & kept) | (mirror[j] & ~kept);
  }
  return own;
}

/// Stores a staged box across the diagonal up to it, and the mirror image above it.
template <int kColumns>
AK_DEVICE void store_across_diagonal(uint32_t staging, int row, int column, int batch, const Args& args) {
  constexpr int kChunks = kColumns / 8;
  const auto store = [&](int r, int c, const Vec<uint32_t, 4>& chunk) {
    store_vec(reinterpret_cast<uint32_t*>(address_in(args.epilogue.c, batch, r, c)), chunk);
  };
  AK_NO_UNROLL
  for (uint32_t i = thread_in_warpgroup(); i < 64 * kChunks; i += kWarpgroupThreads) {
    const int line = i / kChunks, chunk = i % kChunks, r = row + line, c = column + chunk * 8;
    if (c <= r && r < args.m) {
      auto elements = load_shared_16(staging + box_offset<(kColumns < 64)>(line, chunk));
      if (c + 8 > r) {
        const auto mirror = load_shared_16(staging + kSliceBytes + box_offset(r - column, line / 8));
        elements = mirrored_chunk(elements, mirror, r + 1 - c);
      }
      store(r, c, elements);
    }
    const int turned_line = i / 8, turned_chunk = i % 8, above = row + turned_chunk * 8;
    if (above > column + turned_line && above < args.m)
      store(column + turned_line, above, load_shared_16(staging + kSliceBytes + box_offset(turned_line, turned_chunk)));
  }
}

/// Stores a box of kColumns columns, and its mirror image.
template <class T, int kColumns>
AK_DEVICE void store_mirrored_box(const float* sums, const MirroredMaps& maps, uint32_t staging, int consumer, int row,
                                  int column, int batch, const Args& args) {
  constexpr bool kNarrow = kColumns < 64;
  if (row >= args.m || column >= row + 64) return;
  const Epilogue& e = args.epilogue;
  const int thread = thread_in_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t own = lane_address<false, kNarrow>(staging, warp, lane);
  const uint32_t turned = staging + kSliceBytes + box_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  uint32_t pairs[kColumns / 4];
  if (e.residual.data) load_lower_pairs(args, batch, row, column, pairs);
  wait_for_staging(thread, consumer);
  AK_UNROLL
  for (int j = 0; j < kColumns; j += 16) {
    float v[8];
    AK_UNROLL
    for (int i = 0; i < 8; i++) v[i] = e.alpha * sums[j / 2 + i];
    if (e.residual.data) {
      AK_UNROLL
      for (int i = 0; i < 4; i++) {
        float low, high;
        widen_pair<T>(pairs[j / 4 + i], low, high);
        v[2 * i] = fma(e.beta, low, v[2 * i]), v[2 * i + 1] = fma(e.beta, high, v[2 * i + 1]);
      }
    }
    if (row + warp * 16 == column + j) {
      AK_UNROLL
      for (int i = 0; i < 8; i++) {  // of the pairs on the diagonal: their rows' blocks of 8 are their columns'
        if (i / 4 == i / 2 % 2 && lane / 4 == lane % 4 * 2 + i % 2) v[i] += e.diagonal;
      }
    }
    uint32_t r[4];
    AK_UNROLL
    for (int i = 0; i < 4; i++) r[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
    stmatrix_x4(advance_columns<false, kNarrow>(own, j), r);
    stmatrix_x4_trans(turned + j * 128, r);
  }
  if (column + kColumns > row) {
    named_barrier(consumer + 1, kWarpgroupThreads);
    return store_across_diagonal<kColumns>(staging, row, column, batch, args);
  }
  publish_staging(consumer);
  if (thread == 0) {
    tma_store(kNarrow ? maps.tall : maps.square, staging, column, row, batch);
    tma_store(kNarrow ? maps.flat : maps.square, staging + kSliceBytes, row, column, batch);
    bulk_commit();
  }
}

/// Stores a consumer's accumulators, whose first row is `m`.
template <class T, class Tile>
AK_DEVICE void store_mirrored(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const MirroredMaps& maps,
                              uint32_t staging, int consumer, int m, const Work& work, const Args& args) {
  constexpr int kSquares = Tile::kBlockN / 64 * 64;
  AK_UNROLL
  for (int slice = 0; slice < Tile::kSlicesM; slice++) {
    const auto store = [&](auto columns, int at) {
      store_mirrored_box<T, columns.value>(acc[slice] + at / 2, maps, staging, consumer, m + slice * 64, work.n + at,
                                           work.batch, args);
    };
    AK_UNROLL
    for (int at = 0; at < kSquares; at += 64) store(std::integral_constant<int, 64>(), at);
    AK_UNROLL
    for (int at = kSquares; at < Tile::kBlockN; at += kNarrowColumns)
      store(std::integral_constant<int, kNarrowColumns>(), at);
  }
}

}  // namespace gemm
}  // namespace ak
