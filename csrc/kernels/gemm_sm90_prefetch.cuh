// What the epilogue of gemm_sm90 reads beside the sums, residual or pre-activation, asked into L2 in time.
//
// Work: the operand's bytes, once, from memory into L2, while the tensor cores work on the tile that they belong to.
// Without that they come from memory when the consumers ask for them, about a microsecond later where memory is busy,
// and beside their sums the consumers have registers for no more than some 4 KB on their way a multiprocessor: half a
// terabyte a second over a whole H200. Plan: the producer's warp, most of which is idle, asks for a few lines of 128
// bytes with each step of k, a lane for each, so that the operand neither waits in L2 for longer than a main loop nor,
// where that has many steps, comes in a burst. It takes no register and no shared memory of the consumers. Traps: what
// lies beyond the operand's edge may belong to nobody, so no address may be beyond its last byte; and the producer has
// few registers, beside three consumers none for this.
#pragma once
#include "device/prefetch.cuh"
#include "device/warp.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

/// What the producer's warp asks for with step number `step` of a tile. All is computed anew each time: the producer
/// keeps no registers for it.
template <class Tile>
AK_DEVICE void prefetch_beside(const Args& args, const Work& work, int step) {
  constexpr int kLine = 128;
  const Beside& t = args.beside;
  const int m = opaque(work.m), n = opaque(work.n);
  // Some of a tile, or all, may lie beside C or below it; and the parts of a split k share a tile.
  const int columns = args.columns - n < args.tile_columns ? args.columns - n : args.tile_columns;
  const int rows = args.m - m < Tile::kBlockM ? args.m - m : Tile::kBlockM, last = columns * t.element_bytes - 1;
  if (columns <= 0 || work.split != 0) return;
  const char* const tile =
      t.data + work.batch * t.batch_bytes + m * t.row_bytes + static_cast<int64_t>(n) * t.element_bytes;
  AK_NO_UNROLL
  for (int i = 0; i < t.in_step; i++) {
    const auto line = static_cast<uint32_t>((step * t.in_step + i) * kWarpThreads + lane_index()), in_row = t.in_row;
    const int row = line / in_row, byte = line % in_row * kLine;
    if (row >= rows) return;
    const char* const p = tile + row * t.row_bytes + (byte < last ? byte : last);
    prefetch_line(p);
    if (t.value_bytes != 0) prefetch_line(p + t.value_bytes);
  }
}

}  // namespace gemm
}  // namespace ak
