#pragma once
// Streams rows of any length and alignment through shared memory; a block takes every n-th row. cp.async copies the
// aligned 16-byte words of a row, and single threads copy the elements before and after them, so that a row has the
// same alignment in shared as in global memory. Thread t then takes columns t, t + kThreads, ...: its columns and their
// order do not depend on the address. A row that fits is loaded once; a longer one is loaded in pieces, and again for a
// second pass. The next pieces are in flight meanwhile.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/element.cuh"
#include "base/row.cuh"
#include "device/async_copy.cuh"
#include "device/block.cuh"
#include "device/launch.cuh"

namespace ak {

inline constexpr int kPieceThreads = 1024;  ///< per SM: 64 registers per thread
/// Bytes of shared memory before the slots, for reduce().
template <int kThreads>
inline constexpr int kPieceSumBytes = 2 * (kThreads / kWarpThreads) * 4;

/// Columns per piece, number of slots in shared memory, bytes per slot, bytes of shared memory, blocks per SM.
struct PieceShape {
  int columns, slots, slot_bytes, bytes, blocks;
};

/// Bytes of shared memory for a piece of a matrix with elements of `bytes`; 0: no matrix.
AK_HD int64_t piece_bytes(int columns, int bytes) {
  return bytes == 0 ? 0 : (static_cast<int64_t>(columns) * bytes + 2 * (kWord - 1)) & -kWord;
}

/// Sum over all matrices.
template <int kMatrices>
int64_t piece_bytes(int columns, const int (&bytes)[kMatrices]) {
  int64_t sum = 0;
  for (int m = 0; m < kMatrices; m++) sum += piece_bytes(columns, bytes[m]);
  return sum;
}

inline constexpr int kBatch = 8;  ///< maximum columns per thread and batch
/// kColumns columns from `column` on, kApart apart.
template <int kColumns, int kApart>
struct Batch {
  static constexpr int kCount = kColumns, kStep = kApart;
  int column;
};

/// Rows: at(m, row) is the address of a row in matrix m; reads(row) is false for rows to skip.
template <int kThreads, int kMatrices, class Rows>
class RowPieces {
 public:
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kSumBytes = kPieceSumBytes<kThreads>;

  /// Rows of matrices with elements of `bytes` (0: no matrix), in one pass or two. Starts the first copies.
  AK_DEVICE RowPieces(const int (&bytes)[kMatrices], int64_t rows, int columns, const PieceShape& shape,
                      const Rows& rows_of, bool twice = true)
      : of_(rows_of), shape_(shape), rows_(rows), columns_(columns), comes_again_(twice && shape.columns < columns) {
    AK_UNROLL
    for (int m = 0; m < kMatrices; m++) bytes_[m] = bytes[m];
    look_ahead();
    AK_NO_UNROLL
    for (int slot = 0; slot + 1 < shape_.slots; slot++) copy(slot);
    slot_ = shape_.slots - 1;
    load_edges();
  }

  /// Calls f(first column) for the pieces of a row, waiting for each; `again`: second pass, which reloads a row in
  /// pieces.
  template <class F>
  AK_DEVICE void for_each_piece(bool again, F f) {
    AK_NO_UNROLL
    for (int begin = 0; begin < columns_; begin += shape_.columns) {
      if (!again || shape_.columns < columns_) wait();
      f(begin);
    }
  }

  /// Calls f(batch) for this thread's columns, kBatch at a time and then one by one.
  template <class F>
  AK_DEVICE void for_each_batch(F f) const {
    int column = thread_index();
    AK_NO_UNROLL
    for (; column + (kBatch - 1) * kThreads < left_; column += kBatch * kThreads) f(Batch<kBatch, kThreads>{column});
    AK_NO_UNROLL
    for (; column < left_; column += kThreads) f(Batch<1, kThreads>{column});
  }
  /// Reads a batch of matrix m, whose elements are T.
  template <class T, int kCount, int kStep>
  AK_DEVICE void read(float (&values)[kBatch], int m, Batch<kCount, kStep> batch) const {
    const auto row = shared_at<T>(at_[m]) + batch.column;
    AK_UNROLL
    for (int j = 0; j < kCount; j++) values[j] = to_float(static_cast<T>(row[j * kStep]));
  }
  template <int kCount, int kStep>
  AK_DEVICE void read(float (&values)[kBatch], int m, DType dtype, Batch<kCount, kStep> batch) const {
    with_row_dtype(dtype, [&]<class T>(T) { read<T>(values, m, batch); });
  }
  /// True if the piece contains a column; its value.
  AK_DEVICE bool has(int column) const { return column >= 0 && column < left_; }
  AK_DEVICE float value(int column, int m, DType dtype) const {
    float result = 0.0f;
    with_row_dtype(dtype, [&]<class T>(T) { result = to_float(static_cast<T>(shared_at<T>(at_[m])[column])); });
    return result;
  }
  /// read() for the batches of write_words(): a 16-byte word or a single element.
  template <class T, int kCount>
  AK_DEVICE void read_word(float (&values)[kBatch], int m, Batch<kCount, 1> batch) const {
    if constexpr (kCount == 1) {
      read<T>(values, m, batch);
    } else {
      const auto v = unpacked<T>(load_shared_16(at_[m] + batch.column * static_cast<int>(sizeof(T))));
      AK_UNROLL
      for (int j = 0; j < kCount; j++) values[j] = v[j];
    }
  }
  /// A column whose result differs, if the piece contains it.
  struct Exception {
    int column;
    float value;
  };
  /// Writes results of the row at `to` in 16-byte words aligned as those of matrix m, which has the same element type.
  /// f(batch) computes the results of its columns into `values`; they may not depend on the grouping of columns. If
  /// `to` has another alignment, the results are staged in m's slot.
  template <class T, class F>
  AK_DEVICE void write_words(float (&values)[kBatch], T* to, int m, Exception exception, F f) const {
    constexpr int kSize = sizeof(T), kOfWord = kWord / kSize;
    const uint32_t place = at_[m];
    const bool direct = phase(to) == place % kWord;
    to = opaque(to);  // so that it is not recomputed for each word
    const Run run(place % kWord, left_ * kSize);
    AK_NO_UNROLL
    for (int column = run.head / kSize + thread_index() * kOfWord; column < run.tail() / kSize;
         column += kThreads * kOfWord) {
      f(Batch<kOfWord, 1>{column});
      Vec<T, kOfWord> word;
      AK_UNROLL
      for (int j = 0; j < kOfWord; j++) word[j] = round_to<T>(values[j]);
      if (direct) {
        store_vec(to + column, word);
      } else {
        store_shared_16(place + column * kSize, packed(word));
      }
    }
    const auto put = [&](int byte, float value) {
      if (direct) {
        store(to + byte / kSize, round_to<T>(value));
      } else {
        shared_at<T>(place + byte)[0] = round_to<T>(value);
      }
    };
    if (const int edge = run.edge(kSize); edge >= 0) {
      f(Batch<1, 1>{edge / kSize});
      put(edge, values[0]);
    }
    if (has(exception.column)) {
      const int byte = exception.column * kSize;  // overwritten by the same thread
      if (run.writer(byte, kSize) == thread_index()) put(byte, exception.value);
    }
    if (direct) return;
    block_sync();
    AK_NO_UNROLL
    for (int column = thread_index(); column < left_; column += kThreads)
      store(to + column, static_cast<T>(shared_at<T>(place)[column]));
  }

  /// block_reduce without static shared memory, which kernels with more than 48 KB of dynamic shared memory cannot
  /// have. Each warp combines all warps' values by shuffles, so that no thread holds them. The order is fixed.
  template <class Op>
  AK_DEVICE float reduce(float value, Op op) {
    value = warp_reduce(value, op);
    // Double-buffered with one barrier: the call in between protects a buffer's reuse.
    const auto of_warp = shared_at<float>(dynamic_shared() + turn_ * (kSumBytes / 2));
    turn_ ^= 1;
    if (lane_index() == 0) of_warp[warp_index()] = value;
    block_sync();
    value = of_warp[lane_index() % kWarps];
    AK_UNROLL
    for (int mask = kWarps / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
    return value;
  }

  AK_DEVICE float sum(float value) {
    return reduce(value, [](float a, float b) { return a + b; });
  }

  /// Waits for outstanding copies, after the last row.
  AK_DEVICE void finish() const { copy_wait<0>(); }

 private:
  AK_DEVICE static uint32_t phase(const void* at) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) % kWord;
  }

  /// Bytes of a piece: `head` bytes before the first 16-byte boundary, words, and the bytes after them.
  struct Run {
    int bytes, head, words;

    AK_DEVICE Run(uint32_t phase, int count) : bytes(count) {
      const int to_boundary = static_cast<int>(-phase % kWord);
      head = to_boundary < bytes ? to_boundary : bytes;
      words = (bytes - head) / kWord;
    }
    /// First byte after the words.
    AK_DEVICE int tail() const { return head + words * kWord; }
    /// Offset of this thread's element outside the words, of `size` bytes; -1: it has none.
    AK_DEVICE int edge(int size) const {
      const int at = thread_index() < kWord ? thread_index() * size : tail() + (thread_index() - kWord) * size;
      return at < (thread_index() < kWord ? head : bytes) ? at : -1;
    }
    /// Thread that writes the byte, in a word or in a single element.
    AK_DEVICE int writer(int byte, int size) const {
      if (byte < head) return byte / size;
      return byte < tail() ? (byte - head) / kWord % kThreads : kWord + (byte - tail()) / size;
    }
  };

  /// Position in the sequence of pieces.
  struct Place {
    int64_t row = block_index();
    int begin = 0;
    bool again = false;
  };
  /// Advances to the next piece; true if it is another row.
  AK_DEVICE bool go_on(Place& place) const {
    place.begin += shape_.columns;
    if (place.begin < columns_) return false;
    place.begin = 0;
    place.again = !place.again && comes_again_;
    if (!place.again) place.row += grid_blocks();
    return !place.again;
  }
  AK_DEVICE const uint8_t* from(const Place& place, int m) const {
    return of_.at(m, place.row) + static_cast<int64_t>(place.begin) * bytes_[m];
  }
  AK_DEVICE int columns_at(const Place& place) const {
    return columns_ - place.begin < shape_.columns ? columns_ - place.begin : shape_.columns;
  }
  AK_DEVICE uint32_t slot_at(int slot) const { return dynamic_shared() + kSumBytes + slot * shape_.slot_bytes; }

  /// Starts the copies of the next piece's words, unless none is left or its row is skipped.
  AK_DEVICE void copy(int slot) {
    if (reads_) {
      uint32_t to = slot_at(slot);
      AK_UNROLL
      for (int m = 0; m < kMatrices; m++) {
        if (bytes_[m] == 0) continue;
        const uint8_t* begin = from(to_copy_, m);
        const Run run(phase(begin), columns_at(to_copy_) * bytes_[m]);
        const uint32_t at = to + phase(begin);
        AK_NO_UNROLL
        for (int byte = run.head + thread_index() * kWord; byte < run.tail(); byte += kThreads * kWord)
          copy_async<kWord>(at + byte, begin + byte);
        to += static_cast<uint32_t>(piece_bytes(shape_.columns, bytes_[m]));
      }
    }
    if (to_copy_.row < rows_ && go_on(to_copy_)) look_ahead();
    copy_commit();
  }
  AK_DEVICE void look_ahead() { reads_ = to_copy_.row < rows_ && of_.reads(to_copy_.row); }

  /// Loads the next piece's elements outside the words; wait() stores them to shared memory.
  AK_DEVICE void load_edges() {
    phases_ = 0;
    if (next_.row >= rows_) return;
    AK_UNROLL
    for (int m = 0; m < kMatrices; m++) {
      if (bytes_[m] == 0) continue;
      const uint8_t* begin = from(next_, m);
      phases_ |= phase(begin) << m * 4;
      const int at = Run(phase(begin), columns_at(next_) * bytes_[m]).edge(bytes_[m]);
      if (at < 0) continue;
      if (bytes_[m] == 2) edges_[m] = load(reinterpret_cast<const uint16_t*>(begin + at));
      if (bytes_[m] == 4) edges_[m] = load(reinterpret_cast<const uint32_t*>(begin + at));
    }
  }

  /// Waits for the next piece and starts the copies of another one into the previous slot.
  AK_DEVICE void wait() {
    const int last = slot_;
    slot_ = slot_ + 1 == shape_.slots ? 0 : slot_ + 1;
    left_ = columns_at(next_);
    uint32_t at = slot_at(slot_);
    AK_UNROLL
    for (int m = 0; m < kMatrices; m++) {
      if (bytes_[m] == 0) continue;
      const uint32_t phase = phases_ >> m * 4 & (kWord - 1);
      at_[m] = at + phase;
      at += static_cast<uint32_t>(piece_bytes(shape_.columns, bytes_[m]));
      const Run run(phase, left_ * bytes_[m]);
      const int edge = run.edge(bytes_[m]);
      if (edge < 0) continue;
      if (bytes_[m] == 2) shared_at<uint16_t>(at_[m] + edge)[0] = static_cast<uint16_t>(edges_[m]);
      if (bytes_[m] == 4) shared_at<uint32_t>(at_[m] + edge)[0] = edges_[m];
    }
    go_on(next_);
    load_edges();
    if (shape_.slots == 2) {
      copy_wait<0>();
    } else if (shape_.slots == 3) {
      copy_wait<1>();
    } else {
      copy_wait<2>();
    }
    block_sync();
    copy(last);
  }

  const Rows of_;
  const PieceShape& shape_;
  const int64_t rows_;
  int columns_, slot_ = 0, left_ = 0, turn_ = 0;
  int bytes_[kMatrices];
  uint32_t at_[kMatrices], edges_[kMatrices] = {};
  uint32_t phases_ = 0;     // offsets from 16 bytes of the next piece, 4 bits per matrix
  const bool comes_again_;  // rows are loaded a second time
  bool reads_;              // the row to copy next is not skipped
  Place to_copy_, next_;
};

/// Shape for matrices with elements of `bytes` and blocks of kThreads threads.
template <int kThreads, int kMatrices>
PieceShape piece_shape(const int (&bytes)[kMatrices], int columns) {
  constexpr int kSlots = 4;  // at most
  constexpr int kSums = kPieceSumBytes<kThreads>;
  const auto slots_of = [&](int piece, int blocks) {
    return static_cast<int>(std::min<int64_t>(kSlots, (shared_share(blocks) - kSums) / piece_bytes(piece, bytes)));
  };
  PieceShape shape{columns, 0, 0, 0, kPieceThreads / kThreads};
  while (shape.blocks > 1 && slots_of(columns, shape.blocks) < 2) shape.blocks /= 2;
  for (int pieces = 2; shape.columns > kWord && slots_of(shape.columns, shape.blocks) < 2; pieces++)
    shape.columns = ((columns + pieces - 1) / pieces + kWord - 1) & -kWord;
  shape.slots = slots_of(shape.columns, shape.blocks);
  shape.slot_bytes = static_cast<int>(piece_bytes(shape.columns, bytes));
  shape.bytes = kSums + shape.slots * shape.slot_bytes;
  return shape;
}

/// Launches kernel_of(block size, as a constant), which takes (p, shape) and begins with wait_for_previous_kernel().
template <int kMatrices, class KernelOf, class Problem>
Status launch_pieces(const char* name, const int (&bytes)[kMatrices], int columns, const Problem& p, Stream stream,
                     KernelOf kernel_of) {
  const auto with = [&]<int kThreads>(std::integral_constant<int, kThreads> threads) {
    const PieceShape shape = piece_shape<kThreads>(bytes, columns);
    const int64_t resident = static_cast<int64_t>(device_sm_count()) * shape.blocks;
    const LaunchConfig config{.name = name,
                              .grid = static_cast<int>(std::min<int64_t>(p.rows, resident)),
                              .block = kThreads,
                              .shared_bytes = static_cast<std::size_t>(shape.bytes),
                              .overlap_previous = true,
                              .stream = stream};
    return launch(kernel_of(threads), config, p, shape);
  };
  if (columns <= 1792) return with(std::integral_constant<int, 64>{});
  if (columns <= 4096) return with(std::integral_constant<int, 256>{});
  return with(std::integral_constant<int, 512>{});
}

}  // namespace ak
