// How the accumulators of gemm_sm90 leave: the epilogue, then stores through shared memory.
#pragma once
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

/// The four registers that stmatrix_x4 takes: 16 columns of a slice, from column 16 j on, rounded.
template <class T>
AK_DEVICE void round_16_columns(const float* acc, int j, uint32_t (&r)[4]) {
  AK_UNROLL
  for (int i = 0; i < 4; i++) r[i] = round_pair<T>(acc[8 * j + 2 * i], acc[8 * j + 2 * i + 1]);
}

/// Byte offset, in a box with rows of 128 bytes, of 16-byte chunk `chunk` of row `row`.
AK_DEVICE uint32_t box_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

/// Before a consumer writes its staging buffer: the last store has left it.
AK_DEVICE void wait_for_staging(int thread, int consumer) {
  if (thread == 0) bulk_wait_read<0>();
  named_barrier(consumer + 1, kWarpgroupThreads);
}

/// After it: what all its threads have written is there for the copy engine.
AK_DEVICE void publish_staging(int consumer) {
  fence_proxy_async();
  named_barrier(consumer + 1, kWarpgroupThreads);
}

/// Stores a staged box of 64 rows, or adds it to C.
AK_DEVICE void store_box(const TensorMap* map_c, uint32_t box, int column, int row, int batch, GemmOutput output) {
  if (output == GemmOutput::kAccumulate) {
    tma_reduce_add(map_c, box, column, row, batch);
  } else {
    tma_store(map_c, box, column, row, batch);
  }
}

/// Stores a slice of 64 rows as 16-bit values by TMA, kStageColumns at a time, up to column `end`.
template <class T, class Tile>
AK_DEVICE void store_rounded_boxes(const float (&acc)[Tile::kBlockN / 2], const TensorMap* map_c, uint32_t staging,
                                   int consumer, int batch, int m, int n, int end) {
  constexpr int kColumns = Tile::kStageColumns;
  const int thread = thread_index() % kWarpgroupThreads, warp = thread / kWarpThreads, lane = lane_index();
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / kColumns; part++) {
    wait_for_staging(thread, consumer);
    AK_UNROLL
    for (int j = 0; j < kColumns / 16; j++) {
      uint32_t r[4];
      round_16_columns<T>(acc + part * kColumns / 2, j, r);
      const int row = warp * 16 + lane % 16, chunk = j * 2 + lane / 16;
      stmatrix_x4(staging + chunk / 8 * kSliceBytes + box_offset(row, chunk % 8), r);
    }
    publish_staging(consumer);
    if (thread == 0) {
      for (int box = 0; box < kColumns / 64; box++) {
        const int x = n + part * kColumns + box * 64;
        if (x < end) tma_store(map_c, staging + box * kSliceBytes, x, m, batch);
      }
      bulk_commit();
    }
  }
}

/// Stores a slice of 64 rows as 16-bit values, each warp its 16 rows, for widths that do not divide into boxes.
template <class T, class Tile>
AK_DEVICE void store_rounded_rows(const float (&acc)[Tile::kBlockN / 2], uint32_t staging, int batch, int m, int n,
                                  const Args& args) {
  constexpr int kPitch = Tile::kRowPitch, kChunks = Tile::kBlockN / 8;
  const int warp = thread_index() % kWarpgroupThreads / kWarpThreads, lane = lane_index();
  const uint32_t mine = staging + warp * 16 * kPitch;
  AK_UNROLL
  for (int j = 0; j < Tile::kBlockN / 16; j++) {
    uint32_t r[4];
    round_16_columns<T>(acc, j, r);
    stmatrix_x4(mine + lane % 16 * kPitch + (j * 2 + lane / 16) * 16, r);
  }
  warp_sync();
  for (int i = lane; i < 16 * kChunks; i += kWarpThreads) {
    const int row = i / kChunks, chunk = i % kChunks, y = m + warp * 16 + row, x = n + chunk * 8;
    if (y >= args.m || x >= args.n) continue;
    const auto eight = load_shared_16(mine + row * kPitch + chunk * 16);
    T* to = detail::address<T>(args.epilogue.c, batch, y, x);
    if (x + 8 <= args.n) {
      store_vec(reinterpret_cast<uint32_t*>(to), eight);
    } else {
      AK_UNROLL
      for (int e = 0; e < 8; e++) {
        if (x + e < args.n) store(to + e, T{static_cast<uint16_t>(eight[e / 2] >> (16 * (e % 2)))});
      }
    }
  }
  warp_sync();  // the rows are read before the next slice overwrites them
}

/// Stores a slice of 64 rows in fp32 by TMA, or adds it, 64 columns at a time: two boxes with rows of 32 values.
template <class Tile>
AK_DEVICE void store_float_boxes(const float (&acc)[Tile::kBlockN / 2], const TensorMap* map_c, uint32_t staging,
                                 int consumer, int batch, int m, int n, int end, GemmOutput output) {
  const int thread = thread_index() % kWarpgroupThreads, warp = thread / kWarpThreads, lane = lane_index();
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / 64; part++) {
    wait_for_staging(thread, consumer);
    AK_UNROLL
    for (int j = 0; j < 8; j++) {
      const float* d = acc + part * 32 + j * 4;
      const int row = warp * 16 + lane / 4, column = j * 8 + lane % 4 * 2;
      const uint32_t box = staging + column / 32 * kSliceBytes, in_chunk = column % 4 * 4;
      const int chunk = column % 32 / 4;
      store_shared_2(box + box_offset(row, chunk) + in_chunk, d[0], d[1]);
      store_shared_2(box + box_offset(row + 8, chunk) + in_chunk, d[2], d[3]);
    }
    publish_staging(consumer);
    if (thread == 0) {
      for (int box = 0; box < 2; box++) {
        const int x = n + part * 64 + box * 32;
        if (x < end) store_box(map_c, staging + box * kSliceBytes, x, m, batch, output);
      }
      bulk_commit();
    }
  }
}

/// Applies the epilogue to a consumer's accumulators, whose first row in C is `m`, and stores the results. A chunk is 8
/// columns, twice: half a tile apart where that gives whole boxes, so that swiglu's gate and value meet. The loop over
/// the chunks is a loop, or the code of the epilogue would stand there for each of them; registers have no index, so a
/// branch that all threads take together picks the chunk's. The accumulators are only read: results that went back into
/// them would cost registers, and ptxas would run the wgmma one by one.
template <class T, bool kFloat, class Tile>
AK_DEVICE void store_with_epilogue(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const TensorMap* map_c,
                                   uint32_t staging, int consumer, int m, const Work& work, const Args& kernel_args) {
  constexpr bool kHalvesApart = Tile::kBlockN % 128 == 0;
  constexpr int kChunkPitch = kHalvesApart ? 8 : 16,
                kHalfPitch = kHalvesApart ? Tile::kBlockN / 2 : 8;  // columns to the next chunk, half
  constexpr int kChunks = Tile::kBlockN / 16;
  constexpr int kBoxColumns = kFloat ? 32 : 64;  // columns, 128 bytes; one box a half, or one for both
  const int thread = thread_index() % kWarpgroupThreads, warp = thread / kWarpThreads, lane = lane_index();
  AK_NO_UNROLL
  for (int i = 0; i < Tile::kSlicesM * kChunks; i++) {
    const Args& args = *opaque(&kernel_args);  // read where it is needed: kept in registers, it would push others out
    const bool halved = args.tile_columns < Tile::kBlockN, boxes = Tile::kBoxes && !args.epilogue.direct;
    const int column = i % kChunks * kChunkPitch, in_box = column % kBoxColumns, row = m + i / kChunks * 64;
    if (boxes && in_box == 0) wait_for_staging(thread, consumer);
    // Pick the chunk's sums.
    float v[2][1][4];
    AK_UNROLL
    for (int chunk = 0; chunk < Tile::kSlicesM * kChunks; chunk++) {
      if (chunk != i) continue;
      AK_UNROLL
      for (int j = 0; j < 8; j++)
        v[j / 4][0][j % 4] =
            acc[chunk / kChunks][chunk % kChunks * (kChunkPitch / 2) + j / 4 * (kHalfPitch / 2) + j % 4];
    }
    // Apply the epilogue to them.
    Chunk at;
    at.batch = work.batch;
    at.end[0] = args.columns;
    at.end[1] = halved ? args.n : args.columns;
    at.row = row + warp * 16 + lane / 4;
    at.column[0] = work.n + column + lane % 4 * 2;
    at.column[1] = at.column[0] + (kHalvesApart ? args.second_half : kHalfPitch);
    finish_chunk(args.epilogue, at, v);
    if (!boxes) continue;  // they are in C
    // Stage the results, and store a box when it is full.
    if constexpr (kFloat) {
      AK_UNROLL
      for (int h = 0; h < 2; h++) {
        const int x = in_box + (kHalvesApart ? 0 : 8 * h) + lane % 4 * 2, y = warp * 16 + lane / 4;
        const uint32_t box = staging + (kHalvesApart ? h * kSliceBytes : 0), in_chunk = x % 4 * 4;
        store_shared_2(box + box_offset(y, x / 4) + in_chunk, v[h][0][0], v[h][0][1]);
        store_shared_2(box + box_offset(y + 8, x / 4) + in_chunk, v[h][0][2], v[h][0][3]);
      }
    } else {
      uint32_t r[4];
      AK_UNROLL
      for (int j = 0; j < 4; j++) r[j] = round_pair<T>(v[j / 2][0][j % 2 * 2], v[j / 2][0][j % 2 * 2 + 1]);
      const int h = lane / 16, x = in_box / 8 + (kHalvesApart ? 0 : h);
      stmatrix_x4(staging + (kHalvesApart ? h * kSliceBytes : 0) + box_offset(warp * 16 + lane % 16, x), r);
    }
    if (in_box + kChunkPitch < kBoxColumns) continue;
    publish_staging(consumer);
    if (thread == 0) {
      for (int h = 0; h < (kHalvesApart && !halved ? 2 : 1); h++) {
        const int x = work.n + column - in_box + h * kHalfPitch;
        const uint32_t from = staging + h * kSliceBytes;
        if (x < args.columns) store_box(map_c, from, x, row, work.batch, args.output);
      }
      bulk_commit();
    }
  }
}

/// Stores a consumer's accumulators, whose first row in C is `m`, as they are.
template <class T, bool kFloat, class Tile>
AK_DEVICE void store_plain(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const TensorMap* map_c,
                           uint32_t staging, int consumer, int m, const Work& work, const Args& args) {
  const int end = args.columns;
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) {
    if constexpr (kFloat) {
      store_float_boxes<Tile>(acc[i], map_c, staging, consumer, work.batch, m + i * 64, work.n, end, args.output);
    } else if constexpr (Tile::kBoxes) {
      store_rounded_boxes<T, Tile>(acc[i], map_c, staging, consumer, work.batch, m + i * 64, work.n, end);
    } else {
      store_rounded_rows<T, Tile>(acc[i], staging, work.batch, m + i * 64, work.n, args);
    }
  }
}

}  // namespace gemm
}  // namespace ak
