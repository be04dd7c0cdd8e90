// The end of a tile of gemm_sm80: the epilogue in registers, and results through shared memory to C in whole rows.
#pragma once
#include "device/block.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/sm80/tile.cuh"

namespace ak {
namespace mma_gemm {

/// Stores results through shared memory: each warp stages 16 rows of its columns in a buffer of its own.
template <class Tile>
class Output {
 public:
  static constexpr int kColumns = Tile::kWarpN / 2;            // per half
  static constexpr int kBytes = 2 * 16 * (kColumns * 4 + 32);  // per warp, at most

  AK_DEVICE Output(const Args& args, const Work& work)
      : args_(args), batch_(work.batch), size_(bytes_of(args.finish.c.type)) {
    // Padded so that writes to 8 (16-bit) or 4 (fp32) rows do not conflict in banks.
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
    constexpr int kApart = kColumns / 8;  // rows between those that eight lanes read, without conflicts in banks
    const int each = 16 / size_, vectors = kColumns / each;
    AK_NO_UNROLL
    for (int i = lane_index(); i < halves_ * 16 * vectors; i += kWarpThreads) {
      const int half = i / (16 * vectors), turn = i / vectors % 16, x = i % vectors * each;
      const int row = turn * kApart % 16 + turn * kApart / 16;
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

}  // namespace mma_gemm
}  // namespace ak
