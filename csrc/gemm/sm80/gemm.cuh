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

/// Stores results through shared memory: each warp stages 16 rows of its columns in a buffer of its own.
template <class Tile>
class Output {
 public:
  static constexpr int kColumns = Tile::kWarpN / 2;            // per half
  static constexpr int kBytes = 2 * 16 * (kColumns * 4 + 32);  // per warp, at most

  AK_DEVICE Output(const Args& args, const Work& work)
      : args_(args), batch_(work.batch), size_(bytes_of(args.finish.c.type)) {
    // Padded so that neither writes to 8 (16-bit) or 4 (fp32) rows nor 16-byte reads conflict in banks.
    pitch_ = kColumns * size_ + (size_ == 2 ? 16 : 32);
    corner_ = dynamic_shared() + warp_index() * kBytes;
    const int warp_n = warp_index() / Tile::kWarpsM * kColumns;
    const bool halved = args.tile_columns < Tile::kBlockN;
    row_ = work.m + warp_index() % Tile::kWarpsM * Tile::kWarpM;
    column_[0] = work.n + warp_n;
    column_[1] = work.n + args.second_half + warp_n;
    end_[0] = args.columns;
    end_[1] = args.finish.n;
    halves_ = halved ? 1 : 2;
  }

  /// Position of this thread's sums of a chunk.
  AK_DEVICE Chunk chunk(int c) const {
    const int lane = lane_index(), right = c % Tile::kParts * 16 + lane % 4 * 2;
    return {
        batch_, row_ + c / Tile::kParts * 16 + lane / 4, {column_[0] + right, column_[1] + right}, {end_[0], end_[1]}};
  }

  /// Rounds and stages a chunk; stores the rows after their last chunk.
  AK_DEVICE void put(int c, const float (&v)[2][2][4]) const {
    const DType type = args_.finish.c.type;
    const int lane = lane_index(), part = c % Tile::kParts;
    AK_UNROLL
    for (int i = 0; i < 8; i++) {
      const int half = i / 4, block = i / 2 % 2, r = i % 2, row = lane / 4 + 8 * r;
      const float x = v[half][block][2 * r], y = v[half][block][2 * r + 1];
      const uint32_t to = line(half, row) + (part * 16 + block * 8 + lane % 4 * 2) * size_;
      if (type == DType::kFloat32) {
        store_shared_2(to, x, y);
      } else {
        store_shared_4(to, type == DType::kBFloat16 ? round_pair<bf16>(x, y) : round_pair<fp16>(x, y));
      }
    }
    if (part + 1 < Tile::kParts) return;
    warp_sync();
    const int row = row_ + c / Tile::kParts * 16;
    if constexpr (Tile::kTriangular) store_mirrored(row);
    if (Tile::kTriangular && column_[1] + kColumns > row) {
      store_lower(row);
    } else if (args_.wide_c) {
      store_vectors(row);
    } else if (size_ == 2) {
      store_elements<uint16_t>(row);
    } else {
      store_elements<float>(row);
    }
    warp_sync();  // the rows have been read before the next chunk overwrites them
  }

 private:
  // Not by index: a dynamic index would put the array into local memory.
  AK_DEVICE int column_of(int half) const { return half == 0 ? column_[0] : column_[1]; }
  AK_DEVICE int end_of(int half) const { return half == 0 ? end_[0] : end_[1]; }
  AK_DEVICE uint32_t line(int half, int row) const { return corner_ + (half * 16 + row) * pitch_; }
  template <class E>
  AK_DEVICE E* element(int row, int column) const {
    const GemmValues& c = args_.finish.c;
    return static_cast<E*>(c.data) + batch_ * c.batch_stride + row * c.row_stride + column * c.column_stride;
  }

  AK_DEVICE void store_vectors(int first_row) const {
    const int each = 16 / size_, vectors = kColumns / each;
    AK_NO_UNROLL
    for (int i = lane_index(); i < halves_ * 16 * vectors; i += kWarpThreads) {
      const int half = i / (16 * vectors), row = i / vectors % 16, x = i % vectors * each;
      const int column = column_of(half) + x, left = end_of(half) - column;
      if (first_row + row >= args_.finish.m || left <= 0) continue;
      const auto v = load_shared_16(line(half, row) + x * size_);
      if (size_ == 2) {
        auto* to = element<uint16_t>(first_row + row, column);
        if (left >= each) {
          store_vec(reinterpret_cast<uint32_t*>(to), v);
        } else {
          AK_UNROLL
          for (int e = 0; e < 8; e++) {
            if (e < left) store(to + e, static_cast<uint16_t>(v[e / 2] >> (16 * (e % 2))));
          }
        }
      } else {
        auto* to = element<uint32_t>(first_row + row, column);
        if (left >= each) {
          store_vec(to, v);
        } else {
          AK_UNROLL
          for (int e = 0; e < 4; e++) {
            if (e < left) store(to + e, v[e]);
          }
        }
      }
    }
  }

  /// Up to the diagonal, element by element.
  AK_DEVICE void store_lower(int first_row) const {
    AK_NO_UNROLL
    for (int i = lane_index(); i < 2 * 16 * kColumns; i += kWarpThreads) {
      const int half = i / (16 * kColumns), row = i / kColumns % 16, x = i % kColumns, column = column_of(half) + x;
      if (first_row + row >= args_.finish.m || column > first_row + row) continue;
      const uint16_t value = shared_at<uint16_t>(line(half, row))[x];
      store(element<uint16_t>(first_row + row, column), value);
    }
  }

  /// Stores the elements below the diagonal as rows of C above it: a lane takes a column of 16 staged rows, 32 bytes of
  /// C.
  AK_DEVICE void store_mirrored(int first_row) const {
    AK_NO_UNROLL
    for (int i = lane_index(); i < 2 * kColumns; i += kWarpThreads) {
      const int half = i / kColumns, column = column_of(half) + i % kColumns;
      Vec<uint32_t, 4> rows[2];
      AK_UNROLL
      for (int r = 0; r < 16; r += 2) {
        const uint16_t low = shared_at<uint16_t>(line(half, r))[i % kColumns],
                       high = shared_at<uint16_t>(line(half, r + 1))[i % kColumns];
        rows[r / 8][r / 2 % 4] = low | static_cast<uint32_t>(high) << 16;
      }
      if (args_.wide_c && column < first_row && first_row + 16 <= args_.finish.m) {
        auto* to = reinterpret_cast<uint32_t*>(element<uint16_t>(column, first_row));
        store_vec(to, rows[0]);
        store_vec(to + 4, rows[1]);
        continue;
      }
      AK_UNROLL
      for (int r = 0; r < 16; r++) {
        if (first_row + r >= args_.finish.m || column >= first_row + r) continue;
        const uint32_t pair = rows[r / 8][r / 2 % 4];
        store(element<uint16_t>(column, first_row + r), static_cast<uint16_t>(r % 2 == 0 ? pair : pair >> 16));
      }
    }
  }

  /// For rows of any alignment and stride: adjacent lanes store adjacent elements, and pairs of 16-bit values if they
  /// share a 4-byte word.
  template <class E>
  AK_DEVICE void store_elements(int first_row) const {
    constexpr int kEach = 4 / sizeof(E);
    constexpr int kWords = kColumns / kEach + kEach - 1;  // a row may touch
    AK_NO_UNROLL
    for (int i = lane_index(); i < halves_ * 16 * kWords; i += kWarpThreads) {
      const int half = i / (16 * kWords), row = i / kWords % 16;
      if (first_row + row >= args_.finish.m) continue;
      const int column = column_of(half), left = end_of(half) - column, size = left < kColumns ? left : kColumns;
      E* to = element<E>(first_row + row, column);
      const bool apart = args_.finish.c.column_stride != 1;
      const int skew = apart ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(E) % kEach);
      const int x = i % kWords * kEach - skew;
      const auto from = shared_at<E>(line(half, row));
      if (kEach == 2 && !apart && x >= 0 && x + 2 <= size) {
        store(reinterpret_cast<uint32_t*>(to + x),
              static_cast<uint32_t>(from[x]) | static_cast<uint32_t>(from[x + kEach - 1]) << 16);
        continue;
      }
      AK_UNROLL
      for (int e = 0; e < kEach; e++) {
        if (x + e >= 0 && x + e < size) {
          store(to + (x + e) * args_.finish.c.column_stride, static_cast<E>(from[x + e]));
        }
      }
    }
  }

  const Args& args_;
  int batch_, size_, pitch_, row_, halves_;
  uint32_t corner_;
  int column_[2], end_[2];
};

/// Loads a chunk of an fp32 C; zeros out of bounds.
AK_DEVICE void load_chunk(const EpilogueArgs& finish, const Chunk& at, float (&v)[2][2][4]) {
  AK_UNROLL
  for (int i = 0; i < 16; i++) {
    const int column = at.column_of(i / 8) + i / 4 % 2 * 8 + i % 2, row = at.row + i / 2 % 2 * 8;
    const GemmValues& c = finish.c;
    const int64_t offset = at.batch * c.batch_stride + row * c.row_stride + column * c.column_stride;
    const bool inside = row < finish.m && column < at.end_of(i / 8);
    v[i / 8][i / 4 % 2][i % 4] = inside ? load(static_cast<const float*>(c.data) + offset) : 0.0f;
  }
}

/// Adds to the elements of a chunk that are on the diagonal.
AK_DEVICE void add_diagonal(float diagonal, const Chunk& at, float (&v)[2][2][4]) {
  AK_UNROLL
  for (int i = 0; i < 16; i++) {
    const int column = at.column_of(i / 8) + i / 4 % 2 * 8 + i % 2, row = at.row + i / 2 % 2 * 8;
    if (row == column) v[i / 8][i / 4 % 2][i % 4] += diagonal;
  }
}

/// Applies the epilogue to the sums of a tile and stores the results.
template <class Tile>
AK_DEVICE void finish_tile(const Args& args, const Work& work, float (&acc)[Tile::kChunks][2][2][4]) {
  block_sync();  // no warp reads the ring any more
  const Output<Tile> output(args, work);
  if (args.finish.plain) {
    AK_UNROLL
    for (int c = 0; c < Tile::kChunks; c++) output.put(c, acc[c]);
    return;
  }
  // The epilogue is long: a single copy of its code works on acc[0], and the other chunks move up.
  AK_NO_UNROLL
  for (int c = 0; c < Tile::kChunks; c++) {
    finish_chunk(args.finish, output.chunk(c), acc[0]);
    if constexpr (Tile::kTriangular) add_diagonal(args.finish.epilogue.diagonal, output.chunk(c), acc[0]);
    output.put(c, acc[0]);
    AK_UNROLL
    for (int i = 0; i + 1 < Tile::kChunks; i++) {
      AK_UNROLL
      for (int e = 0; e < 16; e++) acc[i][e / 8][e / 4 % 2][e % 4] = acc[i + 1][e / 8][e / 4 % 2][e % 4];
    }
  }
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
