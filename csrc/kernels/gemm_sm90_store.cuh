// How the accumulators of gemm_sm90 leave where all that happens to them happens to one at a time: nothing, a factor or
// a bias. Each is read once, in an unrolled loop, changed on its way, and stored through shared memory.
#pragma once
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

// ---- what happens to a sum: pair(x) loads what two columns from x on need, apply(sum, pair, i) is for the i-th of
// them.

struct AsItIs {
  struct Pair {};
  AK_DEVICE Pair pair(int) const { return {}; }
  AK_DEVICE float apply(float sum, Pair, int) const { return sum; }
};
struct Scaled {
  float alpha;
  struct Pair {};
  AK_DEVICE Pair pair(int) const { return {}; }
  AK_DEVICE float apply(float sum, Pair, int) const { return alpha * sum; }
};
template <class B>
struct Biased {
  const B* bias;
  int end;  ///< columns
  using Pair = Vec<B, 2>;
  AK_DEVICE Pair pair(int x) const { return x < end ? load_vec<2>(bias + x) : Pair{}; }
  AK_DEVICE float apply(float sum, const Pair& pair, int i) const { return sum + to_float(pair[i]); }
};

/// The pairs of this thread in kCount / 2 blocks of 16 columns from column `x` on.
template <int kCount, class Change>
AK_DEVICE void load_pairs(const Change& change, int x, typename Change::Pair (&pairs)[kCount]) {
  AK_UNROLL
  for (int j = 0; j < kCount; j++) pairs[j] = change.pair(x + 8 * j + lane_index() % 4 * 2);
}

/// The four registers that stmatrix_x4 takes: the 16 columns whose sums begin at `d`, rounded.
template <class T, class Change>
AK_DEVICE void round_16_columns(const float* d, const Change& change, const typename Change::Pair* pairs,
                                uint32_t (&r)[4]) {
  AK_UNROLL
  for (int i = 0; i < 4; i++) {
    const auto& pair = pairs[i / 2];
    r[i] = round_pair<T>(change.apply(d[2 * i], pair, 0), change.apply(d[2 * i + 1], pair, 1));
  }
}

/// Byte offset, in a box with rows of 128 bytes, of 16-byte chunk `chunk` of row `row`.
AK_DEVICE uint32_t box_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

/// This thread's number in its warpgroup. Opaque: addresses that follow from it are computed for each tile, and take no
/// registers from the main loop.
AK_DEVICE uint32_t thread_of_consumer() { return static_cast<uint32_t>(opaque(thread_index())) % kWarpgroupThreads; }

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

/// Stores a slice of 64 rows as 16-bit values by TMA, kStageColumns at a time, up to column `end`.
template <class T, class Tile, class Change>
AK_DEVICE void store_rounded_boxes(const float (&acc)[Tile::kBlockN / 2], const Change& change, const TensorMap* map_c,
                                   uint32_t staging, int consumer, int batch, int m, int n, int end) {
  constexpr int kColumns = Tile::kStageColumns;
  const int thread = thread_of_consumer(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / kColumns; part++) {
    typename Change::Pair pairs[kColumns / 8];
    load_pairs(change, n + part * kColumns, pairs);
    wait_for_staging(thread, consumer);
    AK_UNROLL
    for (int j = 0; j < kColumns / 16; j++) {
      uint32_t r[4];
      round_16_columns<T>(acc + part * kColumns / 2 + 8 * j, change, pairs + 2 * j, r);
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
template <class T, class Tile, class Change>
AK_DEVICE void store_rounded_rows(const float (&acc)[Tile::kBlockN / 2], const Change& change, uint32_t staging,
                                  int batch, int m, int n, const Args& args) {
  constexpr int kPitch = Tile::kRowPitch, kChunks = Tile::kBlockN / 8;
  const int thread = thread_of_consumer(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t mine = staging + warp * 16 * kPitch;
  AK_UNROLL
  for (int j = 0; j < Tile::kBlockN / 16; j++) {
    typename Change::Pair pairs[2];
    load_pairs(change, n + 16 * j, pairs);
    uint32_t r[4];
    round_16_columns<T>(acc + 8 * j, change, pairs, r);
    stmatrix_x4(mine + lane % 16 * kPitch + (j * 2 + lane / 16) * 16, r);
  }
  warp_sync();
  const Operand& c = args.epilogue.c;
  for (int i = lane; i < 16 * kChunks; i += kWarpThreads) {
    const int row = i / kChunks, chunk = i % kChunks, y = m + warp * 16 + row, x = n + chunk * 8;
    if (y >= args.m || x >= args.n) continue;  // all of a chunk or nothing
    char* const to = c.data + batch * c.batch_bytes + y * c.row_bytes + x * c.column_bytes;
    store_vec(reinterpret_cast<uint32_t*>(to), load_shared_16(mine + row * kPitch + chunk * 16));
  }
  warp_sync();  // the rows are read before the next slice overwrites them
}

/// Stores a slice of 64 rows in fp32 by TMA, or adds it, 64 columns at a time: two boxes with rows of 32 values.
template <class Tile, class Change>
AK_DEVICE void store_float_boxes(const float (&acc)[Tile::kBlockN / 2], const Change& change, const TensorMap* map_c,
                                 uint32_t staging, int consumer, int batch, int m, int n, int end, GemmOutput output) {
  const int thread = thread_of_consumer(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / 64; part++) {
    typename Change::Pair pairs[8];
    load_pairs(change, n + part * 64, pairs);
    wait_for_staging(thread, consumer);
    AK_UNROLL
    for (int j = 0; j < 8; j++) {
      const float* d = acc + part * 32 + j * 4;
      const int row = warp * 16 + lane / 4, column = j * 8 + lane % 4 * 2;
      const uint32_t box = staging + column / 32 * kSliceBytes, in_chunk = column % 4 * 4;
      const int chunk = column % 32 / 4;
      store_shared_2(box + box_offset(row, chunk) + in_chunk, change.apply(d[0], pairs[j], 0),
                     change.apply(d[1], pairs[j], 1));
      store_shared_2(box + box_offset(row + 8, chunk) + in_chunk, change.apply(d[2], pairs[j], 0),
                     change.apply(d[3], pairs[j], 1));
    }
    publish_staging(consumer);
    if (thread == 0) {
      for (int box = 0; box < 2; box++) {
        const int x = n + part * 64 + box * 32;
        if (x >= end) continue;
        if (output == GemmOutput::kAccumulate) {
          tma_reduce_add(map_c, staging + box * kSliceBytes, x, m, batch);
        } else {
          tma_store(map_c, staging + box * kSliceBytes, x, m, batch);
        }
      }
      bulk_commit();
    }
  }
}

/// Stores a consumer's accumulators, whose first row in C is `m`, each with its `change`.
template <class T, bool kFloat, class Tile, class Change>
AK_DEVICE void store_tile(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const Change& change,
                          const TensorMap* map_c, uint32_t staging, int consumer, int m, const Work& work,
                          const Args& args) {
  const int end = args.columns;
  AK_UNROLL
  for (int i = 0; i < Tile::kSlicesM; i++) {
    const int row = m + i * 64;
    if constexpr (kFloat) {
      store_float_boxes<Tile>(acc[i], change, map_c, staging, consumer, work.batch, row, work.n, end, args.output);
    } else if constexpr (Tile::kBoxes) {
      store_rounded_boxes<T, Tile>(acc[i], change, map_c, staging, consumer, work.batch, row, work.n, end);
    } else {
      store_rounded_rows<T, Tile>(acc[i], change, staging, work.batch, row, work.n, args);
    }
  }
}

}  // namespace gemm
}  // namespace ak
