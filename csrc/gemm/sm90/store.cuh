// How the accumulators of gemm_sm90 leave where all that happens to them happens to one at a time: nothing, a factor or
// a bias. Each is read once, in an unrolled loop, changed on its way, and stored through shared memory: by TMA or,
// where C's rows begin anywhere, by the threads, a warp 128 bytes of a row at a time.
#pragma once
#include "base/element.cuh"
#include "device/block.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

/// This thread's number in its warpgroup, and in its warp. Opaque: what follows from them is computed for each tile,
/// and takes no registers from the main loop.
AK_DEVICE uint32_t thread_of_warpgroup() { return static_cast<uint32_t>(opaque(thread_index())) % kWarpgroupThreads; }
AK_DEVICE int lane_of_tile() { return static_cast<uint32_t>(opaque(thread_index())) % kWarpThreads; }

/// The two values of a word, as round_pair() packs them.
template <class T>
AK_DEVICE void widen_pair(uint32_t pair, float& low, float& high) {
  low = to_float(T{static_cast<uint16_t>(pair)});
  high = to_float(T{static_cast<uint16_t>(pair >> 16)});
}

// ---- what happens to a sum: pair(x, further) loads what two columns from x + further on need, if anything is; apply(
// sum, pair, i) is for the i-th of them. `further` is known at compile time, so that one address serves all pairs.

struct AsItIs {
  struct Pair {};
  AK_DEVICE float apply(float sum, Pair, int) const { return sum; }
};
struct Scaled {
  float alpha;
  struct Pair {};
  AK_DEVICE float apply(float sum, Pair, int) const { return alpha * sum; }
};
template <class B>
struct Biased {
  const B* bias;
  int end;                                    ///< columns
  using Pair = Vec<uint32_t, sizeof(B) / 2>;  ///< as it lies in memory
  AK_DEVICE Pair pair(int x, int further) const {
    return load_vec<sizeof(B) / 2>(reinterpret_cast<const uint32_t*>(bias + x + further));
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

/// Any of these, for a C that TMA cannot write: then the threads store what is staged.
struct Anything {
  float alpha;       ///< 1 beside a bias, so that the fma rounds what the others round
  const void* bias;  ///< or null
  DType type;        ///< fp32 or the inputs'
  int end;           ///< columns
  using Pair = Vec<float, 2>;
  AK_DEVICE Pair pair(int x, int further) const { return {{value(x + further), value(x + further + 1)}}; }
  AK_DEVICE static Pair nothing() { return {{-0.0f, -0.0f}}; }  // changes no sum
  AK_DEVICE float apply(float sum, const Pair& pair, int i) const { return fma(alpha, sum, pair[i]); }

 private:
  AK_DEVICE float value(int x) const { return x < end ? load_element(type, element(bias, type, x)) : 0.0f; }
};
template <class Change>
inline constexpr bool kByThreads = std::is_same_v<Change, Anything>;

/// The kCount pairs of this thread from column `x` on, 8 columns apart. All threads have them all, but for C's last
/// columns: only there each pair is asked for by itself.
template <int kCount, class Change>
AK_DEVICE void load_pairs(const Change& change, int x, typename Change::Pair* pairs) {
  if constexpr (!std::is_empty_v<typename Change::Pair>) {
    const int first = x + lane_of_tile() % 4 * 2;
    if (x + 8 * kCount <= change.end) {
      AK_UNROLL
      for (int j = 0; j < kCount; j++) pairs[j] = change.pair(first, 8 * j);
    } else {
      AK_UNROLL
      for (int j = 0; j < kCount; j++)
        pairs[j] = first + 8 * j < change.end ? change.pair(first, 8 * j) : typename Change::Pair{};
    }
  }
}

template <int kCount>
AK_DEVICE void load_pairs(const Anything& change, int x, Anything::Pair* pairs) {
  AK_UNROLL
  for (int j = 0; j < kCount; j++) pairs[j] = Anything::nothing();
  if (!change.bias) return;
  const int first = x + lane_of_tile() % 4 * 2;
  AK_UNROLL
  for (int j = 0; j < kCount; j++) pairs[j] = change.pair(first, 8 * j);
}

/// This thread's values of 16 columns, whose sums begin at `sums`.
template <class Change>
AK_DEVICE void change_16_columns(const float* sums, const Change& change, const typename Change::Pair* pairs,
                                 float (&v)[8]) {
  AK_UNROLL
  for (int i = 0; i < 8; i++) v[i] = change.apply(sums[i], pairs[i / 4], i % 2);
}

/// Writes them rounded; `at` is this lane's row of stmatrix.
template <class T>
AK_DEVICE void store_rounded(uint32_t at, const float* v) {
  uint32_t r[4];
  AK_UNROLL
  for (int i = 0; i < 4; i++) r[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
  stmatrix_x4(at, r);
}

/// Byte offset, in a box with rows of 128 bytes, of 16-byte chunk `chunk` of row `row`.
AK_DEVICE uint32_t box_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// ---- a thread's values of 16 columns of a box: rows lane / 4 and 8 + lane / 4 of its warp's 16, columns 2 (lane % 4)
// and the next of every 8; value 4 b + 2 h + i is in the b-th 8 columns, in row h, column i. As in the accumulators.

/// Where this lane reads and writes the first 16 columns of boxes that begin at `box`, a multiple of 1,024.
template <bool kFloat, bool kNarrow>
AK_DEVICE uint32_t lane_of_box(uint32_t box, int warp, int lane) {
  if (kFloat) return box + box_offset(warp * 16 + lane / 4, lane % 4 / 2) + lane % 2 * 8;
  const int row = warp * 16 + lane % 16, chunk = lane / 16;
  return box + (kNarrow ? row * 32 + ((chunk ^ (row / 4 & 1)) << 4) : box_offset(row, chunk));
}
/// The same of those that begin `column` columns further on, a multiple of 16.
template <bool kFloat, bool kNarrow>
AK_DEVICE uint32_t further(uint32_t at, int column) {
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

/// Where the columns of a tile from `first` on lie: with swiglu the second half of them belongs to the values, which
/// have a matrix of the map, and begin elsewhere in B.
template <class Tile>
struct Columns {
  int x, matrix, of_b;
  AK_DEVICE Columns(const Args& args, const Work& work, int first)
      : x(work.n + first), matrix(work.batch), of_b(work.n + first) {
    if (Tile::kBlockN % 128 != 0 || first < Tile::kBlockN / 2) return;
    of_b += args.values_further;
    if (args.tile_columns == Tile::kBlockN) return;
    x -= Tile::kBlockN / 2;
    matrix = 1;
  }
};

/// Bytes of an address that say how it is aligned.
AK_DEVICE uint32_t low_bytes(const void* p) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)); }

AK_DEVICE char* address_in(const Operand& t, int batch, int row, int column) {
  return t.data + batch * t.batch_bytes + row * t.row_bytes + column * t.column_bytes;
}

/// The rows of C that a warp stores, from `line` on, and the columns from there to C's last.
struct Lines {
  char* line;
  int64_t row_bytes;
  int rows, columns;

  AK_DEVICE Lines(const Args& args, int batch, int row, int x)
      : line(address_in(args.epilogue.c, batch, row, x)),
        row_bytes(args.epilogue.c.row_bytes),
        rows(args.m - row < 16 ? args.m - row : 16),
        columns(args.columns - x) {}
};

/// Rows of 32-bit words as they are staged in boxes, 32 words in each: at(first_row(word), row), rows of 8 at a time.
struct RowsInBoxes {
  uint32_t rows;
  AK_DEVICE uint32_t first_row(int word) const { return rows + word / 32 * kSliceBytes + word % 32 * 4; }
  AK_DEVICE static uint32_t at(uint32_t in_first, int row) { return (in_first ^ (row % 8 << 4)) + row * 128; }
};
/// The same one behind the other.
template <int kPitch>
struct RowsApart {
  uint32_t rows;
  AK_DEVICE uint32_t first_row(int word) const { return rows + word * 4; }
  AK_DEVICE static uint32_t at(uint32_t in_first, int row) { return in_first + row * kPitch; }
};

/// Stores a warp's staged rows of kColumns values, of 16 bits or fp32, into rows of C that begin at any element; with
/// `add` fp32 is added to what is there. A lane takes words of C: where 16-bit values begin within one, the second
/// value of a staged word and the first of the next. What is half a word, at either end of a row, goes last.
template <bool kFloat, int kColumns, class Staged>
AK_DEVICE void store_words(const Lines& to, const Staged& staged, bool add = false) {
  constexpr int kSize = kFloat ? 4 : 2, kWords = kColumns * kSize / 4;
  constexpr int kOfLane = (kWords + kWarpThreads - 1) / kWarpThreads;
  constexpr int kInFlight = 4;  // rows
  const int lane = lane_of_tile(), end = to.columns < kColumns ? to.columns : kColumns;
  if (end <= 0) return;                   // a tile's last columns may all lie beside C
  uint32_t here[kOfLane], next[kOfLane];  // in shared memory
  AK_UNROLL
  for (int j = 0; j < kOfLane; j++) {
    const int word = j * kWarpThreads + lane < kWords ? j * kWarpThreads + lane : 0;
    here[j] = staged.first_row(word);
    next[j] = staged.first_row(word + 1 < kWords ? word + 1 : 0);
  }
  char* line = to.line + lane * 4;
  AK_NO_UNROLL
  for (int top = 0; top < to.rows; top += 8) {
    AK_UNROLL
    for (int first = 0; first < 8; first += kInFlight, line += kInFlight * to.row_bytes) {
      uint32_t words[kInFlight][kOfLane];
      int odd[kInFlight];  // bytes to the first whole word of C
      AK_UNROLL
      for (int i = 0; i < kInFlight; i++) {
        odd[i] = kFloat ? 0 : static_cast<int>((low_bytes(line) + i * static_cast<uint32_t>(to.row_bytes)) & 2);
        AK_UNROLL
        for (int j = 0; j < kOfLane; j++) {
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
          for (int j = 0; j < kOfLane; j++) {
            if (bytes >= (j * kWarpThreads + 1) * 4) f(c + j * kWarpThreads, i, j);
          }
        }
      };
      if (kFloat && add) {
        float before[kInFlight][kOfLane];
        each([&](const uint32_t* c, int i, int j) { before[i][j] = load(reinterpret_cast<const float*>(c)); });
        each([&](uint32_t*, int i, int j) { words[i][j] = bits_of(float_of(words[i][j]) + before[i][j]); });
      }
      each([&](uint32_t* c, int i, int j) { store(c, words[i][j]); });
    }
    AK_UNROLL
    for (int j = 0; j < kOfLane; j++) here[j] = staged.at(here[j], 8), next[j] = staged.at(next[j], 8);
  }
  if (kFloat || lane >= to.rows) return;
  auto* const values = reinterpret_cast<uint16_t*>(to.line + lane * to.row_bytes);
  const int skipped = static_cast<int>(low_bytes(values) / 2 % 2);
  const auto store_one = [&](int x) {
    const uint16_t value = shared_at<uint16_t>(staged.at(staged.first_row(x / 2), lane) + x % 2 * 2)[0];
    store(values + x, value);
  };
  if (skipped) store_one(0);
  if ((end - skipped) % 2 != 0) store_one(end - 1);
}

/// Stores slices of 64 rows, `kColumns` columns at a time: one box or two. What these columns need is loaded once.
template <class T, bool kFloat, class Tile, class Change>
AK_DEVICE void store_boxes(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const Change& change,
                           const TensorMap* map, uint32_t staging, int consumer, int m, const Work& work,
                           const Args& args) {
  constexpr int kBox = kFloat ? 32 : 64, kColumns = kFloat ? 64 : Tile::kStageColumns;
  const bool add = kFloat && args.output == GemmOutput::kAccumulate;
  const int thread = thread_of_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t mine = lane_of_box<kFloat, false>(staging, warp, lane);
  AK_UNROLL
  for (int part = 0; part < Tile::kBlockN / kColumns; part++) {
    typename Change::Pair pairs[kColumns / 8];
    AK_UNROLL
    for (int j = 0; j < kColumns; j += 64)
      load_pairs<8>(change, Columns<Tile>(args, work, part * kColumns + j).of_b, pairs + j / 8);
    AK_UNROLL
    for (int slice = 0; slice < Tile::kSlicesM; slice++) {
      const int row = m + slice * 64;
      wait_for_staging(thread, consumer);
      AK_UNROLL
      for (int j = 0; j < kColumns; j += 16) {
        float v[8];
        change_16_columns(acc[slice] + (part * kColumns + j) / 2, change, pairs + j / 8, v);
        write_half<T, kFloat>(further<kFloat, false>(mine, j % kBox) + j / kBox * kSliceBytes, v);
      }
      publish_staging(consumer);
      if constexpr (kByThreads<Change>) {
        store_words<kFloat, kColumns>(Lines(args, work.batch, row + warp * 16, work.n + part * kColumns),
                                      RowsInBoxes{staging + warp * 16 * 128}, add);
      } else if (thread == 0) {
        for (int box = 0; box < kColumns / kBox; box++) {
          const Columns<Tile> to(args, work, part * kColumns + box * kBox);
          if (to.x >= args.columns) continue;
          if (add) {
            tma_reduce_add(map, staging + box * kSliceBytes, to.x, row, to.matrix);
          } else {
            tma_store(map, staging + box * kSliceBytes, to.x, row, to.matrix);
          }
        }
        bulk_commit();
      }
    }
  }
}

/// Stores a slice of 64 rows as 16-bit values, each warp its 16 rows, for widths that do not divide into boxes of 64
/// columns.
template <class T, class Tile, class Change>
AK_DEVICE void store_rounded_rows(const float (&acc)[Tile::kBlockN / 2], const Change& change, uint32_t staging, int m,
                                  const Work& work, const Args& args) {
  constexpr int kPitch = Tile::kRowPitch, kChunks = Tile::kBlockN / 8;
  const int thread = thread_of_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t mine = staging + warp * 16 * kPitch;
  typename Change::Pair pairs[kChunks];
  load_pairs<kChunks>(change, work.n, pairs);
  AK_UNROLL
  for (int j = 0; j < Tile::kBlockN / 16; j++) {
    float v[8];
    change_16_columns(acc + 8 * j, change, pairs + 2 * j, v);
    store_rounded<T>(mine + lane % 16 * kPitch + (j * 2 + lane / 16) * 16, v);
  }
  warp_sync();
  if constexpr (kByThreads<Change>) {
    store_words<false, Tile::kBlockN>(Lines(args, work.batch, m + warp * 16, work.n), RowsApart<kPitch>{mine});
  } else {
    // A lane's chunks of 16 bytes, from one to the next: so far down and right, where a row ends in the next one.
    constexpr int kDown = kWarpThreads / kChunks, kRight = kWarpThreads % kChunks;
    const Operand& operand = args.z_first ? args.epilogue.z : args.epilogue.c;
    const int64_t row_bytes = operand.row_bytes;
    const int first = m + warp * 16, rows = args.m - first, chunks = (args.n - work.n) / 8;
    int row = lane / kChunks, chunk = lane % kChunks;
    char* to = address_in(operand, work.batch, first + row, work.n + chunk * 8);
    uint32_t from = mine + row * kPitch + chunk * 16;
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
  warp_sync();  // the rows are read before the next slice overwrites them
}

/// Stores a consumer's accumulators, whose first row is `m`, each with its `change`, into C or, where `map` is one of
/// z, there.
template <class T, bool kFloat, class Tile, class Change>
AK_DEVICE void store_tile(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const Change& change,
                          const TensorMap* map, uint32_t staging, int consumer, int m, const Work& work,
                          const Args& args) {
  if constexpr (Tile::kFullBoxes) {
    store_boxes<T, kFloat, Tile>(acc, change, map, staging, consumer, m, work, args);
  } else {
    AK_UNROLL
    for (int i = 0; i < Tile::kSlicesM; i++)
      store_rounded_rows<T, Tile>(acc[i], change, staging, m + i * 64, work, args);
  }
}

}  // namespace gemm
}  // namespace ak
