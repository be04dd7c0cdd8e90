// Direct store of gemm_sm90's accumulators: identity, scale or bias. An unrolled loop reads each accumulator once,
// applies the operation and stages the result in shared memory. From there it is stored by TMA or, if rows of C are
// unaligned, by the threads: each warp writes 128 bytes of a row at a time.
#pragma once
#include "base/element.cuh"
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

/// Index of this thread in its warpgroup and in its warp. Opaque: values derived from them are recomputed per tile and
/// hold no registers during the main loop.
AK_DEVICE uint32_t thread_in_warpgroup() { return static_cast<uint32_t>(opaque(thread_index())) % kWarpgroupThreads; }
AK_DEVICE int lane_in_warp() { return static_cast<uint32_t>(opaque(thread_index())) % kWarpThreads; }

/// Unpacks the two values that round_pair() packs.
template <class T>
AK_DEVICE void widen_pair(uint32_t pair, float& low, float& high) {
  low = to_float(T{static_cast<uint16_t>(pair)});
  high = to_float(T{static_cast<uint16_t>(pair >> 16)});
}

// ---- element operations: pair(x, offset) loads the operands of columns x + offset and the next, and apply(sum, pair,
// i) computes the i-th of the two. `offset` is a compile-time constant, so that all pairs share one base address.

struct Identity {
  struct Pair {};
  AK_DEVICE float apply(float sum, Pair, int) const { return sum; }
};
struct Scale {
  float alpha;
  struct Pair {};
  AK_DEVICE float apply(float sum, Pair, int) const { return alpha * sum; }
};
template <class B>
struct AddBias {
  const B* bias;
  int end;                                    ///< column count
  using Pair = Vec<uint32_t, sizeof(B) / 2>;  ///< not yet widened
  AK_DEVICE Pair pair(int x, int offset) const {
    return load_vec<sizeof(B) / 2>(reinterpret_cast<const uint32_t*>(bias + x + offset));
  }
  AK_DEVICE float apply(float sum, const Pair& pair, int i) const {
    if constexpr (sizeof(B) == 4) {
      return sum + float_of(pair[i]);
    } else {
      float low, high;
      widen_pair<B>(pair[0], low, high);
      return sum + (i == 0 ? low : high);
    }
  }
};

/// Any of the above, for a C that TMA cannot write. The threads store the staged results.
struct ScaleAddBias {
  float alpha;       ///< 1 if there is a bias, so that the fma rounds as AddBias does
  const void* bias;  ///< or null
  DType type;        ///< fp32 or the type of A and B
  int end;           ///< column count
  using Pair = Vec<float, 2>;
  AK_DEVICE Pair pair(int x, int offset) const { return {{value(x + offset), value(x + offset + 1)}}; }
  AK_DEVICE static Pair identity() { return {{-0.0f, -0.0f}}; }  // x + -0.0 is x for every x
  AK_DEVICE float apply(float sum, const Pair& pair, int i) const { return fma(alpha, sum, pair[i]); }

 private:
  AK_DEVICE float value(int x) const { return x < end ? load_element(type, element(bias, type, x)) : 0.0f; }
};
template <class ElementOp>
inline constexpr bool kStoredByThreads = std::is_same_v<ElementOp, ScaleAddBias>;

/// Loads this thread's kCount pairs from column `x` on, 8 columns apart. Only the last columns of C need a bounds check
/// per pair.
template <int kCount, class ElementOp>
AK_DEVICE void load_pairs(const ElementOp& op, int x, typename ElementOp::Pair* pairs) {
  if constexpr (!std::is_empty_v<typename ElementOp::Pair>) {
    const int first = x + lane_in_warp() % 4 * 2;
    if (x + 8 * kCount <= op.end) {
      AK_UNROLL
      for (int j = 0; j < kCount; j++) pairs[j] = op.pair(first, 8 * j);
    } else {
      AK_UNROLL
      for (int j = 0; j < kCount; j++)
        pairs[j] = first + 8 * j < op.end ? op.pair(first, 8 * j) : typename ElementOp::Pair{};
    }
  }
}

template <int kCount>
AK_DEVICE void load_pairs(const ScaleAddBias& op, int x, ScaleAddBias::Pair* pairs) {
  AK_UNROLL
  for (int j = 0; j < kCount; j++) pairs[j] = ScaleAddBias::identity();
  if (!op.bias) return;
  const int first = x + lane_in_warp() % 4 * 2;
  AK_UNROLL
  for (int j = 0; j < kCount; j++) pairs[j] = op.pair(first, 8 * j);
}

/// Applies `op` to this thread's values of the 16 columns that begin at `sums`.
template <class ElementOp>
AK_DEVICE void apply_to_16_columns(const float* sums, const ElementOp& op, const typename ElementOp::Pair* pairs,
                                   float (&v)[8]) {
  AK_UNROLL
  for (int i = 0; i < 8; i++) v[i] = op.apply(sums[i], pairs[i / 4], i % 2);
}

/// Rounds and writes 16 columns; `at` is the row address that this lane passes to stmatrix.
template <class T>
AK_DEVICE void store_rounded(uint32_t at, const float* v) {
  uint32_t r[4];
  AK_UNROLL
  for (int i = 0; i < 4; i++) r[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
  stmatrix_x4(at, r);
}

/// Byte offset of 16-byte chunk `chunk` of row `row` in a box with rows of 128 swizzled bytes, or if kNarrow 32.
template <bool kNarrow = false>
AK_DEVICE uint32_t box_offset(int row, int chunk) {
  return kNarrow ? row * 32 + ((chunk ^ (row / 4 & 1)) << 4) : row * 128 + ((chunk ^ (row & 7)) << 4);
}

// ---- a thread's values of 16 columns of a box, in the layout of the accumulators: rows lane / 4 and 8 + lane / 4 of
// the warp's 16, columns 2 (lane % 4) and the next of every 8. Value 4 b + 2 h + i lies in the b-th 8 columns, row h,
// column i.

/// Address at which this lane reads and writes the first 16 columns of a box; `box` is a multiple of 1,024.
template <bool kFloat, bool kNarrow>
AK_DEVICE uint32_t lane_address(uint32_t box, int warp, int lane) {
  if (kFloat) return box + box_offset(warp * 16 + lane / 4, lane % 4 / 2) + lane % 2 * 8;
  const int row = warp * 16 + lane % 16, chunk = lane / 16;
  return box + box_offset<kNarrow>(row, chunk);
}
/// Moves that address by `column` columns, a multiple of 16.
template <bool kFloat, bool kNarrow>
AK_DEVICE uint32_t advance_columns(uint32_t at, int column) {
  return kNarrow ? at + column * 128 : at ^ column * (kFloat ? 4 : 2);
}

template <class T, bool kFloat>
AK_DEVICE void write_half(uint32_t at, const float* v) {
  if constexpr (kFloat) {
    AK_UNROLL
    for (int i = 0; i < 8; i += 2) store_shared_2((at ^ (i / 4 << 5)) + i / 2 % 2 * 1024, v[i], v[i + 1]);
  } else {
    store_rounded<T>(at, v);
  }
}

/// Waits until the last store has read the staging buffer, so that the consumer may overwrite it.
AK_DEVICE void wait_for_staging(int thread, int consumer) {
  if (thread == 0) bulk_wait_read<0>();
  named_barrier(consumer + 1, kWarpgroupThreads);
}

/// Makes the writes of all threads of the consumer visible to TMA.
AK_DEVICE void publish_staging(int consumer) {
  fence_proxy_async();
  named_barrier(consumer + 1, kWarpgroupThreads);
}

/// Origin of a tile's columns from `first` on. With swiglu the second half of a tile holds values: they are another
/// matrix of the output map and begin at another column of B.
template <class Tile>
struct ColumnOrigin {
  int x, matrix, b_column;
  AK_DEVICE ColumnOrigin(const Args& args, const Work& work, int first)
      : x(work.n + first), matrix(work.batch), b_column(work.n + first) {
    if (Tile::kBlockN % 128 != 0 || first < Tile::kBlockN / 2) return;
    b_column += args.value_gap;
    if (args.tile_columns == Tile::kBlockN) return;
    x -= Tile::kBlockN / 2;
    matrix = 1;
  }
};

/// Low half of an address, for alignment arithmetic.
AK_DEVICE uint32_t low_bits(const void* p) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)); }

AK_DEVICE char* address_in(const Operand& t, int batch, int row, int column) {
  return t.data + batch * t.batch_bytes + row * t.row_bytes + column * t.column_bytes;
}

/// Rows of C that a warp stores, from `line` on, and the columns from there to the edge of C.
struct OutputRows {
  char* line;
  int64_t row_bytes;
  int rows, columns;

  AK_DEVICE OutputRows(const Args& args, int batch, int row, int end, int x)
      : line(address_in(args.epilogue.c, batch, row, x)),
        row_bytes(args.epilogue.c.row_bytes),
        rows(end - row < 16 ? end - row : 16),
        columns(args.columns - x) {}
};

/// Staged rows of 32-bit words in swizzled boxes of 32 words a row. at(word_address(word), row) is valid for 8 rows.
struct BoxedRows {
  uint32_t rows;
  AK_DEVICE uint32_t word_address(int word) const { return rows + word / 32 * kSliceBytes + word % 32 * 4; }
  AK_DEVICE static uint32_t at(uint32_t address, int row) { return (address ^ (row % 8 << 4)) + row * 128; }
};
/// Staged rows at a fixed pitch.
template <int kPitch>
struct PitchedRows {
  uint32_t rows;
  AK_DEVICE uint32_t word_address(int word) const { return rows + word * 4; }
  AK_DEVICE static uint32_t at(uint32_t address, int row) { return address + row * kPitch; }
};

/// Stores a warp's staged rows of kColumns values, 16-bit or fp32, into rows of C with any alignment; `add` accumulates
/// in fp32. A lane writes aligned words of C: if a row of 16-bit values is not word-aligned, each word combines the
/// second value of a staged word with the first of the next. Half words at the ends of a row are stored last.
template <bool kFloat, int kColumns, class Staged>
AK_DEVICE void store_unaligned_rows(const OutputRows& to, const Staged& staged, bool add = false) {
  constexpr int kSize = kFloat ? 4 : 2, kWords = kColumns * kSize / 4;
  constexpr int kWordsPerLane = (kWords + kWarpThreads - 1) / kWarpThreads;
  constexpr int kInFlight = 4;  // rows
  const int lane = lane_in_warp(), end = to.columns < kColumns ? to.columns : kColumns;
  if (end <= 0) return;                               // the columns may all be out of bounds
  uint32_t here[kWordsPerLane], next[kWordsPerLane];  // in shared memory
  AK_UNROLL
  for (int j = 0; j < kWordsPerLane; j++) {
    const int word = j * kWarpThreads + lane < kWords ? j * kWarpThreads + lane : 0;
    here[j] = staged.word_address(word);
    next[j] = staged.word_address(word + 1 < kWords ? word + 1 : 0);
  }
  char* line = to.line + lane * 4;
  AK_NO_UNROLL
  for (int top = 0; top < to.rows; top += 8) {
    AK_UNROLL
    for (int first = 0; first < 8; first += kInFlight, line += kInFlight * to.row_bytes) {
      uint32_t words[kInFlight][kWordsPerLane];
      int odd[kInFlight];  // bytes to the first aligned word of C
      AK_UNROLL
      for (int i = 0; i < kInFlight; i++) {
        odd[i] = kFloat ? 0 : static_cast<int>((low_bits(line) + i * static_cast<uint32_t>(to.row_bytes)) & 2);
        AK_UNROLL
        for (int j = 0; j < kWordsPerLane; j++) {
          words[i][j] = shared_at<uint32_t>(staged.at(here[j], first + i))[0];
          if (kFloat) continue;
          const uint32_t high = shared_at<uint32_t>(staged.at(next[j], first + i))[0];
          words[i][j] = static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | words[i][j]) >> (8 * odd[i]));
        }
      }
      const auto each = [&](auto f) {
        char* row = line;
        AK_UNROLL
        for (int i = 0; i < kInFlight; i++, row += to.row_bytes) {
          auto* const c = reinterpret_cast<uint32_t*>(row + odd[i]);
          const int bytes = top + first + i < to.rows ? end * kSize - 4 * lane - odd[i] : 0;  // from there to the end
          AK_UNROLL
          for (int j = 0; j < kWordsPerLane; j++) {
            if (bytes >= (j * kWarpThreads + 1) * 4) f(c + j * kWarpThreads, i, j);
          }
        }
      };
      if (kFloat && add) {
        float before[kInFlight][kWordsPerLane];
        each([&](const uint32_t* c, int i, int j) { before[i][j] = load(reinterpret_cast<const float*>(c)); });
        each([&](uint32_t*, int i, int j) { words[i][j] = bits_of(float_of(words[i][j]) + before[i][j]); });
      }
      each([&](uint32_t* c, int i, int j) { store(c, words[i][j]); });
    }
    AK_UNROLL
    for (int j = 0; j < kWordsPerLane; j++) here[j] = staged.at(here[j], 8), next[j] = staged.at(next[j], 8);
  }
  if (kFloat || lane >= to.rows) return;
  auto* const values = reinterpret_cast<uint16_t*>(to.line + lane * to.row_bytes);
  const int skipped = static_cast<int>(low_bits(values) / 2 % 2);
  const auto store_one = [&](int x) {
    const uint16_t value = shared_at<uint16_t>(staged.at(staged.word_address(x / 2), lane) + x % 2 * 2)[0];
    store(values + x, value);
  };
  if (skipped) store_one(0);
  if ((end - skipped) % 2 != 0) store_one(end - 1);
}

/// Stores the box at (x, row) of a matrix; a group's rows end before row `end`.
template <class Tile>
AK_DEVICE void store_box(const TensorMap* map, uint32_t from, int x, int row, int matrix, int end) {
  if constexpr (Tile::kRowGroups) {
    tma_store(map, from, x, ragged_line(row, end), kRaggedLines, end);
  } else {
    tma_store(map, from, x, row, matrix);
  }
}

/// Stores slices of 64 rows, `kColumns` columns (one or two boxes) at a time. All slices share the loaded operands.
template <class T, bool kFloat, class Tile, class ElementOp>
AK_DEVICE void store_boxes(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const ElementOp& op,
                           const TensorMap* map, uint32_t staging, int consumer, int m, const Work& work,
                           const Args& args) {
  constexpr int kBox = kFloat ? 32 : 64, kColumns = kFloat ? 64 : Tile::kStageColumns;
  const bool add = kFloat && !Tile::kChained && args.output == Output::kAccumulate;
  const int thread = thread_in_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t lane_base = lane_address<kFloat, false>(staging, warp, lane);
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / kColumns; part++) {
    typename ElementOp::Pair pairs[kColumns / 8];
    AK_UNROLL
    for (int j = 0; j < kColumns; j += 64)
      load_pairs<8>(op, ColumnOrigin<Tile>(args, work, part * kColumns + j).b_column, pairs + j / 8);
    AK_UNROLL
    for (int slice = 0; slice < Tile::kSlicesM; slice++) {
      if (slice > 0 && has_lone_slice<Tile>(work)) break;
      const int row = m + slice * 64;
      wait_for_staging(thread, consumer);
      AK_UNROLL
      for (int j = 0; j < kColumns; j += 16) {
        float v[8];
        apply_to_16_columns(acc[slice] + (part * kColumns + j) / 2, op, pairs + j / 8, v);
        write_half<T, kFloat>(advance_columns<kFloat, false>(lane_base, j % kBox) + j / kBox * kSliceBytes, v);
      }
      publish_staging(consumer);
      if constexpr (kStoredByThreads<ElementOp>) {
        store_unaligned_rows<kFloat, kColumns>(
            OutputRows(args, work.batch, row + warp * 16, end_of_rows<Tile>(args, work), work.n + part * kColumns),
            BoxedRows{staging + warp * 16 * 128}, add);
      } else if (thread == 0) {
        for (int box = 0; box < kColumns / kBox; box++) {
          const ColumnOrigin<Tile> to(args, work, part * kColumns + box * kBox);
          if (to.x >= args.columns) continue;
          if (add) {
            tma_reduce_add(map, staging + box * kSliceBytes, to.x, row, to.matrix);
          } else {
            store_box<Tile>(map, staging + box * kSliceBytes, to.x, row, to.matrix, work.end);
          }
        }
        bulk_commit();
      }
    }
  }
}

/// Stores a slice of 64 rows as 16-bit values, for tile widths that are no multiple of 64. Each warp stores its 16
/// rows.
template <class T, class Tile, class ElementOp>
AK_DEVICE void store_rounded_rows(const float (&acc)[Tile::kBlockN / 2], const ElementOp& op, uint32_t staging, int m,
                                  const Work& work, const Args& args) {
  constexpr int kPitch = Tile::kRowPitch, kChunks = Tile::kBlockN / 8;
  const int thread = thread_in_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t lane_base = staging + warp * 16 * kPitch;
  typename ElementOp::Pair pairs[kChunks];
  load_pairs<kChunks>(op, work.n, pairs);
  AK_UNROLL
  for (int j = 0; j < Tile::kBlockN / 16; j++) {
    float v[8];
    apply_to_16_columns(acc + 8 * j, op, pairs + 2 * j, v);
    store_rounded<T>(lane_base + lane % 16 * kPitch + (j * 2 + lane / 16) * 16, v);
  }
  warp_sync();
  if constexpr (kStoredByThreads<ElementOp>) {
    store_unaligned_rows<false, Tile::kBlockN>(
        OutputRows(args, work.batch, m + warp * 16, end_of_rows<Tile>(args, work), work.n),
        PitchedRows<kPitch>{lane_base});
  } else {
    // Steps from one of a lane's 16-byte chunks to the next; past the end of a row the chunk wraps into the next row.
    constexpr int kDown = kWarpThreads / kChunks, kRight = kWarpThreads % kChunks;
    const Operand& operand = args.stores_z_first ? args.epilogue.z : args.epilogue.c;
    const int64_t row_bytes = operand.row_bytes;
    const int first = m + warp * 16, rows = args.m - first, chunks = (args.n - work.n) / 8;
    int row = lane / kChunks, chunk = lane % kChunks;
    char* to = address_in(operand, work.batch, first + row, work.n + chunk * 8);
    uint32_t from = lane_base + row * kPitch + chunk * 16;
    AK_UNROLL
    for (int i = 0; i < 16 * kChunks / kWarpThreads; i++) {
      if (row < rows && chunk < chunks) store_vec(reinterpret_cast<uint32_t*>(to), load_shared_16(from));
      const bool ends = chunk + kRight >= kChunks;
      row += ends ? kDown + 1 : kDown;
      chunk += ends ? kRight - kChunks : kRight;
      to += kDown * row_bytes + kRight * 16 + (ends ? row_bytes - kChunks * 16 : 0);
      from += kDown * kPitch + kRight * 16 + (ends ? kPitch - kChunks * 16 : 0);
    }
  }
  warp_sync();  // the rows have been read before the next slice overwrites them
}

/// Applies `op` to a consumer's accumulators, whose first row is `m`, and stores them into the tensor of `map`: C or z.
template <class T, bool kFloat, class Tile, class ElementOp>
AK_DEVICE void store_tile(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const ElementOp& op,
                          const TensorMap* map, uint32_t staging, int consumer, int m, const Work& work,
                          const Args& args) {
  if constexpr (Tile::kFullBoxes) {
    store_boxes<T, kFloat, Tile>(acc, op, map, staging, consumer, m, work, args);
  } else {
    AK_UNROLL
    for (int i = 0; i < Tile::kSlicesM; i++) store_rounded_rows<T, Tile>(acc[i], op, staging, m + i * 64, work, args);
  }
}

}  // namespace gemm
}  // namespace ak
