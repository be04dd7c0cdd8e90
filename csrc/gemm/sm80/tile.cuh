// Tiles of gemm_sm80: their shape, the kernel's arguments, and which tile a block computes.
#pragma once
#include "device/block.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/sm80/operand.cuh"

namespace ak {
namespace mma_gemm {

/// A tile of C, divided into warp tiles of kWarpM x kWarpN.
template <int kBlockM_, int kBlockN_, int kWarpM_, int kWarpN_, int kBlocks_, bool kTriangular_ = false>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kBlocks = kBlocks_;           // per SM, limited by registers
  static constexpr bool kTriangular = kTriangular_;  // of a symmetric C only tiles of the lower triangle are computed
  static constexpr bool kChained = false;
  static constexpr int kWarpsM = kBlockM / kWarpM, kWarpsN = kBlockN / kWarpN;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarpThreads;
  static constexpr int kParts = kWarpN / 32;            // 2 x 16 columns each
  static constexpr int kChunks = kWarpM / 16 * kParts;  // of 16 rows and 2 x 16 columns: 16 sums per thread
  static_assert(kWarpM % 32 == 0 && kWarpN % 32 == 0, "a warp's columns are two halves of blocks of 16");
  static_assert(kBlockM % 64 == 0 && kBlockN % 64 == 0, "half a tile is a multiple of a strip");
};

/// A tile whose sums start from C.
template <class Base>
struct ChainedTile : Base {
  static constexpr bool kChained = true;
};

constexpr int kMinStages = 3, kMaxStages = 4;

struct Args {
  EpilogueArgs finish;
  OperandArgs a, b;
  int k;
  int columns;      // of C per matrix: n, or n / 2 with swiglu
  int second_half;  // columns of B from the first half of a tile to the second
  int tile_columns;
  int splits, k_per_split;
  int stages;
  bool wide_c;         // C takes 16-byte stores
  uint32_t* counters;  // of a split product: [batch][tile]
  float* partials;     // [batch][tile][split][tile's sums]
};

constexpr int kRaster = 8;  // rows of tiles rasterized together

/// A block's tile and part of k.
struct Work {
  int m, n;  // first row and column of the tile in C
  int tile;  // index in the batch
  int batch, split, k, k_end;
};

/// Tiles of the lower triangle of a matrix of `tiles` x `tiles`, and row and column of each. The triangle is folded
/// into lines of equal length: of an even number of rows, the last and the first make a line, the last but one and the
/// second, and so on; of an odd number, the last makes a line by itself.
constexpr int64_t triangle_of(int64_t tiles) { return tiles * (tiles + 1) / 2; }
struct TilePlace {
  int row, column;
};
AK_DEVICE TilePlace place_in_triangle(int index, int tiles) {
  const int length = tiles + 1 - tiles % 2, line = index / length, across = index - line * length;
  const int lower = tiles - line;  // tiles of the line's lower row
  if (across < lower) return {lower - 1, across};
  return {line - tiles % 2, across - lower};
}

template <class Tile>
AK_DEVICE Work work_of_block(const Args& args) {
  const int rows = (args.finish.m + Tile::kBlockM - 1) / Tile::kBlockM;
  const int columns = (args.columns + args.tile_columns - 1) / args.tile_columns;
  if constexpr (Tile::kTriangular) {  // K is not split
    const int tiles = static_cast<int>(triangle_of(rows)), tile = block_index() % tiles;
    const TilePlace place = place_in_triangle(tile, rows);
    return {
        place.row * Tile::kBlockM, place.column * Tile::kBlockN, block_index(), block_index() / tiles, 0, 0, args.k};
  }
  const int in_batch = block_index() % (rows * columns * args.splits), tile = in_batch % (rows * columns);
  const int group = tile / (kRaster * columns), in_group = tile % (kRaster * columns);
  const int high = rows - group * kRaster < kRaster ? rows - group * kRaster : kRaster;
  Work work;
  work.m = (group * kRaster + in_group % high) * Tile::kBlockM;
  work.n = in_group / high * args.tile_columns;
  work.batch = block_index() / (rows * columns * args.splits);
  work.tile = work.batch * (rows * columns) + tile;
  work.split = in_batch / (rows * columns);
  work.k = work.split * args.k_per_split;
  work.k_end = args.k - work.k < args.k_per_split ? args.k : work.k + args.k_per_split;
  return work;
}

}  // namespace mma_gemm
}  // namespace ak
