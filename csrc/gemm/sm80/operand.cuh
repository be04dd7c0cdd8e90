// Operands of gemm_sm80: global memory -> shared memory -> fragments.
//
// A k step has 32 elements. An operand's tile is cut into strips of 32 elements (64 bytes) that are contiguous in
// global memory: a k-major operand has one strip per row of A or column of B; an m- or n-major operand has one strip
// per k for every 32 rows or columns. Either way a tile of R rows is R strips of four 16-byte chunks, and ldmatrix
// (with .trans for m- and n-major) finds the rows of its 8 x 8 matrices in eight consecutive strips. Strips that are
// 16-, 8- or 4-byte aligned are copied by cp.async directly to their final place: the chunks of a strip are swizzled by
// xor with bits 1 and 2 of its index, so that neither eight lanes copying two strips nor eight lanes reading one chunk
// of eight strips conflict in banks. Unaligned strips (rows of an odd number of elements) allow no such copy: cp.async
// brings the five aligned 16-byte words that a strip touches, and one step later a thread per strip shifts them in
// place to its start. These strips are 80 bytes apart, which avoids bank conflicts without a swizzle. Traps: the shift
// depends on the strip but not on the step, since a step advances by a multiple of 16 bytes. The first and last word of
// a strip may extend beyond it: copies stop after its last element, and shifting drops the elements before its first.
// The very first word of an operand may begin before it in memory, so it is read element by element.
#pragma once
#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/warp.cuh"
#include "gemm/sm80/gemm.h"

namespace ak {
namespace mma_gemm {

constexpr int kBlockK = 32;      // per step
constexpr int kStripBytes = 64;  // 32 elements
constexpr int kRawWords = kStripBytes / 16 + 1;
constexpr int kShiftedPitch = 16 * kRawWords;

/// Stride of strips in shared memory, in bytes.
AK_HD int strip_pitch(CopyPath path) { return path == CopyPath::kShifted ? kShiftedPitch : kStripBytes; }

struct OperandArgs {
  const uint8_t* data;
  int64_t ld, batch_stride;  // bytes
  Major major;
  CopyPath path;
  // Strides of a thread's pieces: within a block of 32 strips (or of as many as the threads copy at once), from block
  // to block, extra to the second half of the rows, and from step to step.
  int64_t next_strips, next_block, second_half, next_step;
};

/// Strips that `threads` threads copy at once, in pieces of `bytes`.
constexpr int strips_at_once(int threads, int bytes) { return threads / (kStripBytes / bytes); }

/// `second_half`: rows from the first half of a tile to the second.
inline OperandArgs operand_args(const void* data, int64_t ld, int64_t batch_stride, Major major, CopyPath path,
                                int tile_rows, int64_t second_half, int threads) {
  const int at_once = strips_at_once(threads, path == CopyPath::k4Bytes ? 4 : path == CopyPath::k8Bytes ? 8 : 16);
  const int64_t block = at_once > kBlockK ? at_once : kBlockK, apart = second_half - tile_rows / 2;
  const bool k_major = major == Major::kK;
  return {static_cast<const uint8_t*>(data),
          2 * ld,
          2 * batch_stride,
          major,
          path,
          at_once * 2 * ld,
          block * 2 * (k_major ? ld : 1),
          apart * 2 * (k_major ? ld : 1),
          kBlockK * 2 * (k_major ? 1 : ld)};
}

/// Rows of A or columns of B of a tile: two halves, which need not be adjacent. Half h begins at first[h] and is out of
/// bounds from end[h] on.
struct Rows {
  int first[2], end[2];
};

AK_DEVICE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/// Copies one operand of a tile of kRows rows, step by step, with the kThreads threads of a block.
template <int kRows, int kThreads>
class Operand {
 public:
  AK_DEVICE Operand(const OperandArgs& args, int batch, const Rows& rows, int k, int k_end)
      : args_(args), data_(args.data + batch * args.batch_stride), rows_(rows), k_end_(k_end) {
    const int pieces = args.path == CopyPath::k4Bytes ? 16 : args.path == CopyPath::k8Bytes ? 8 : 4;
    const int mine = thread_index() / pieces, offset = thread_index() % pieces * (kStripBytes / pieces);
    next_ = (args.major == Major::kK ? strip<Major::kK>(mine, false, k) : strip<Major::kMN>(mine, false, k)).from;
    next_ += offset;
    place_ = shifted() ? mine * kShiftedPitch + offset
                       : mine * kStripBytes + ((offset / 16) ^ (mine / 2 % 4)) * 16 + offset % 16;
    whole_ = rows.first[0] + kRows / 2 <= rows.end[0] && rows.first[1] + kRows / 2 <= rows.end[1];
  }

  AK_DEVICE bool shifted() const { return args_.path == CopyPath::kShifted; }

  /// Starts copying the step at `k`; successive calls advance by one step. Elements out of bounds become 0.
  AK_DEVICE void copy(uint32_t to, int k) {
    const bool first = shifted() && k == 0 && rows_.first[0] == 0;  // the first word may begin before the operand
    if (whole_ && k + kBlockK <= k_end_ && !first) {
      copy_whole(to, k);
    } else if (args_.major == Major::kK) {
      copy_edge<Major::kK>(to, k);
    } else {
      copy_edge<Major::kMN>(to, k);
    }
    next_ += args_.next_step;
  }

  /// Shifts the strips of an unaligned operand, whose words have arrived, to their start.
  AK_DEVICE void shift(uint32_t strips) const {
    AK_NO_UNROLL
    for (int i = opaque(thread_index()); i < kRows; i += kThreads) {
      const uint32_t at = strips + i * kShiftedPitch;
      uint32_t w[4 * kRawWords];
      AK_UNROLL
      for (int j = 0; j < kRawWords; j++) {
        const auto v = load_shared_16(at + 16 * j);
        AK_UNROLL
        for (int e = 0; e < 4; e++) w[4 * j + e] = v[e];
      }
      const uint32_t ahead = before(start_of(i));
      AK_UNROLL
      for (int e = 0; e + 2 < 4 * kRawWords; e++) w[e] = ahead & 8 ? w[e + 2] : w[e];
      AK_UNROLL
      for (int e = 0; e + 3 < 4 * kRawWords; e++) w[e] = ahead & 4 ? w[e + 1] : w[e];
      AK_UNROLL
      for (int e = 0; e + 4 < 4 * kRawWords; e++) {
        w[e] = static_cast<uint32_t>((static_cast<uint64_t>(w[e + 1]) << 32 | w[e]) >> (8 * (ahead & 2)));
      }
      AK_UNROLL
      for (int j = 0; j < kStripBytes / 16; j++) {
        store_shared_16(at + 16 * j, Vec<uint32_t, 4>{{w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3]}});
      }
    }
  }

 private:
  struct Strip {
    const uint8_t* from;
    int bytes;  // in bounds
  };

  /// Strip `i` of the step at `k`; `second`: it is in the second half.
  template <Major kMajor>
  AK_DEVICE Strip strip(int i, bool second, int k) const {
    const int in_tile = kMajor == Major::kK ? i : i / kBlockK * kBlockK;
    const int row = in_tile + (second ? rows_.first[1] - kRows / 2 : rows_.first[0]);
    const int end = second ? rows_.end[1] : rows_.end[0];
    if constexpr (kMajor == Major::kK) {
      return {data_ + row * args_.ld + 2 * int64_t{k}, row < end ? 2 * clamp(k_end_ - k, 0, kBlockK) : 0};
    } else {
      const int depth = k + i % kBlockK;
      return {data_ + depth * args_.ld + 2 * int64_t{row}, depth < k_end_ ? 2 * clamp(end - row, 0, kBlockK) : 0};
    }
  }
  /// Start of strip `i` of the step at 0; other steps differ by multiples of 16 bytes.
  AK_DEVICE const uint8_t* start_of(int i) const {
    const bool second = i >= kRows / 2;
    return (args_.major == Major::kK ? strip<Major::kK>(i, second, 0) : strip<Major::kMN>(i, second, 0)).from;
  }
  /// Bytes from the last multiple of 16 to `p`.
  AK_DEVICE static uint32_t before(const uint8_t* p) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) % 16;
  }

  // ---- a step in bounds: no checks, and addresses by addition

  AK_DEVICE void copy_whole(uint32_t to, int k) const {
    switch (args_.path) {
      case CopyPath::k16Bytes:
        return copy_pieces<16, false>(to);
      case CopyPath::k8Bytes:
        return copy_pieces<8, false>(to);
      case CopyPath::k4Bytes:
        return copy_pieces<4, false>(to);
      case CopyPath::kShifted:
        copy_pieces<16, true>(to);  // the first four words of each strip
        AK_NO_UNROLL
        for (int i = opaque(thread_index()); i < kRows; i += kThreads) {
          const uint8_t* start = start_of(i) + (args_.major == Major::kK ? 2 * int64_t{k} : k * args_.ld);
          const auto ahead = static_cast<int>(before(start));
          copy_async<16, true>(to + i * kShiftedPitch + kStripBytes, start - ahead + kStripBytes, ahead);
        }
    }
  }

  template <int kBytes, bool kShifted>
  AK_DEVICE void copy_pieces(uint32_t to) const {
    constexpr int kAtOnce = strips_at_once(kThreads, kBytes), kBlock = kAtOnce > kBlockK ? kAtOnce : kBlockK;
    constexpr int kPitch = kShifted ? kShiftedPitch : kStripBytes;
    static_assert(kRows / 2 % kBlock == 0, "all threads copy from the same half");
    const uint8_t* block = next_;
    AK_UNROLL
    for (int i = 0; i < kRows; i += kBlock) {
      const uint8_t* from = block;
      AK_UNROLL
      for (int j = 0; j < kBlock; j += kAtOnce) {
        copy_async<kBytes, kShifted>(to + place_ + (i + j) * kPitch, kShifted ? from - before(from) : from);
        if (j + kAtOnce < kBlock) from = opaque(from + args_.next_strips);
      }
      if (i + kBlock == kRows / 2) block = opaque(block + args_.second_half);
      if (i + kBlock < kRows) block = opaque(block + args_.next_block);
    }
  }

  // ---- a step at the edges: strips may be partial or out of bounds

  template <Major kMajor>
  AK_DEVICE void copy_edge(uint32_t to, int k) const {
    switch (args_.path) {
      case CopyPath::k16Bytes:
        return copy_short_pieces<kMajor, 16>(to, k);
      case CopyPath::k8Bytes:
        return copy_short_pieces<kMajor, 8>(to, k);
      case CopyPath::k4Bytes:
        return copy_short_pieces<kMajor, 4>(to, k);
      case CopyPath::kShifted:
        return copy_short_words<kMajor>(to, k);
    }
  }

  template <Major kMajor, int kBytes>
  AK_DEVICE void copy_short_pieces(uint32_t to, int k) const {
    constexpr int kPieces = kStripBytes / kBytes, kAtOnce = strips_at_once(kThreads, kBytes);
    const int thread = opaque(thread_index()), mine = thread / kPieces, offset = thread % kPieces * kBytes;
    AK_NO_UNROLL
    for (int i = 0; i < kRows; i += kAtOnce) {
      const Strip s = strip<kMajor>(i + mine, i >= kRows / 2, k);
      copy_async<kBytes>(to + place_ + i * kStripBytes, s.from + offset, clamp(s.bytes - offset, 0, kBytes));
    }
  }

  template <Major kMajor>
  AK_DEVICE void copy_short_words(uint32_t to, int k) const {
    AK_NO_UNROLL
    for (int task = opaque(thread_index()); task < kRows * kRawWords; task += kThreads) {
      const int i = task / kRawWords, offset = task % kRawWords * 16;
      const Strip s = strip<kMajor>(i, i >= kRows / 2, k);
      const int ahead = static_cast<int>(before(s.from));
      const int bytes = s.bytes > 0 ? clamp(s.bytes + ahead - offset, 0, 16) : 0;
      const uint8_t* from = s.from - ahead + offset;
      const uint32_t word = to + i * kShiftedPitch + offset;
      if (bytes > 0 && from < data_) {
        copy_first_word(word, from, bytes);
      } else {
        copy_async<16, true>(word, from, bytes);
      }
    }
  }
  /// Copies the word in which the operand begins.
  AK_DEVICE void copy_first_word(uint32_t word, const uint8_t* from, int bytes) const {
    AK_NO_UNROLL
    for (int e = 0; e < 16; e += 2) {
      const bool inside = from + e >= data_ && e < bytes;
      shared_at<uint16_t>(word + e)[0] = inside ? load(reinterpret_cast<const uint16_t*>(from + e)) : uint16_t{0};
    }
  }

  const OperandArgs& args_;
  const uint8_t* data_;
  Rows rows_;
  int k_end_;            // of this block's part of k
  const uint8_t* next_;  // this thread's first piece of the next step
  uint32_t place_;       // its offset in the stage
  bool whole_;           // all rows of the tile are in bounds
};

/// Addresses that a lane passes to ldmatrix_x4, for blocks of 16 rows (columns) by 16 of k. `kA` selects the register
/// order of A: the four matrices as [k][row], else [row][k].
template <bool kA>
class FragmentAddress {
 public:
  /// `first`: the warp's first row in the tile, a multiple of 16.
  AK_DEVICE FragmentAddress(int first, const OperandArgs& args) {
    const bool k_major = args.major == Major::kK;
    const int lane = lane_index(), low = lane / 8 % 2, high = lane / 16;
    const int row = kA ? low : high, k = kA ? high : low;
    const int pitch = strip_pitch(args.path), exchange = args.path == CopyPath::kShifted ? 0 : lane % 8 / 2;
    const int strip = k_major ? first + 8 * row + lane % 8 : first / 32 * 32 + 8 * k + lane % 8;
    const int chunk = k_major ? k : first / 16 % 2 * 2 + row;
    const int at = strip * pitch + (chunk ^ exchange) * 16, neighbour = strip * pitch + (chunk ^ exchange ^ 2) * 16;
    // k-major: the next 16 rows are 16 strips later and the next 16 of k in the other half of the strip. Otherwise the
    // reverse.
    corner_[0][0] = at;
    corner_[0][1] = k_major ? neighbour : at + 16 * pitch;
    corner_[1][0] = k_major ? at + 16 * pitch : neighbour;
    corner_[1][1] = neighbour + 16 * pitch;
    thirty_two_strips_ = 32 * pitch;
    transposed_ = !k_major;
  }
  /// Loads the block `rows` rows after the first, a multiple of 16 (of 32, if `first` is an odd multiple of 16); `k16`
  /// is 0 or 1. Returns the four registers of A, or for B two of the first eight columns and two of the others.
  AK_DEVICE void load(uint32_t (&r)[4], uint32_t operand, int rows, int k16) const {
    ldmatrix_x4(r, operand + corner_[rows / 16 % 2][k16] + rows / 32 * thirty_two_strips_, transposed_);
  }

 private:
  uint32_t corner_[2][2], thirty_two_strips_;
  bool transposed_;
};

}  // namespace mma_gemm
}  // namespace ak
