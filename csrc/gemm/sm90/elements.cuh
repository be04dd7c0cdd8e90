// The epilogue of gemm_sm90 for a C or operands that TMA cannot move: anything, anywhere, one element at a time.
//
// Work: one pass over a consumer's sums in fp32, and over the operands beside them. Plan: the sums leave the registers
// as fp32, 16 rows and up to 64 columns of a warp at a time, through the warp's share of the staging buffer, and come
// back row by row, or column by column where neighbours in memory are those of a column, so that a warp's accesses lie
// together. One copy of the code serves all tiles. Columns beyond C's are not worked on. Traps: the sums are read where
// an unrolled loop stores them, behind a branch that all threads take together: picked into other registers by number,
// they cost a select for each. Warps are on their own, so warp_sync() orders who writes the buffer and who reads it.
#pragma once
#include "base/element.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/warp.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int log2(int x) { return x == 1 ? 0 : 1 + log2(x / 2); }

// ---- the staged rows of a warp: 16 rows of kColumns sums.

/// Byte offset of a value. The groups of 8 columns, 32 bytes, change places with the row, and the halves of a group
/// with its place, so that neither threads that write 8 bytes each of 8 rows meet in a bank, nor those that read 16
/// bytes each of a row. Of row + 8 r, column: 8 r rows further on; of row, column ^ x: the xor with that of 0, x.
template <int kColumns>
AK_DEVICE constexpr uint32_t staged_offset(uint32_t row, uint32_t column) {
  const uint32_t plain = (row * kColumns + column) * 4,
                 moved = plain ^ ((row % (kColumns / 8 < 4 ? kColumns / 8 : 4)) << 5);
  return moved ^ ((moved >> 3) & 16);
}

/// Writes those sums of a slice to the staged rows that begin with column `first`, kWidth columns. With kTwice also
/// those half a tile further on, behind them. A warp's `rows` begin at a multiple of 256 bytes.
template <int kColumns, int kWidth, bool kTwice, int kSlices, int kBlockN>
AK_DEVICE void stage_sums(const float (&acc)[kSlices][kBlockN / 2], uint32_t rows, int slice, int first) {
  constexpr int kParts = ((kTwice ? kBlockN / 2 : kBlockN) + kWidth - 1) / kWidth;
  const uint32_t mine = rows + staged_offset<kColumns>(lane_of_tile() / 4, lane_of_tile() % 4 * 2);
  const int part = slice * kParts + first / kWidth;
  AK_UNROLL
  for (int p = 0; p < kSlices * kParts; p++) {
    if (p != part) continue;
    const int from = p % kParts * kWidth;
    AK_UNROLL
    for (int j = 0; j < (kTwice ? 2 : 1) * kWidth; j += 8) {
      const int column = j < kWidth ? from + j : kBlockN / 2 + from + j - kWidth;
      if (column >= kBlockN) break;
      const float* d = acc[p / kParts] + column / 2;
      const uint32_t to = mine ^ staged_offset<kColumns>(0, j);
      store_shared_2(to, d[0], d[1]);
      store_shared_2(to + staged_offset<kColumns>(8, 0), d[2], d[3]);
    }
  }
}

/// The sum of 16 staged rows of a column; the order is that of every kernel that leaves column sums.
template <int kColumns>
AK_DEVICE float sum_of_rows(uint32_t rows, int column) {
  float sum[8];
  AK_UNROLL
  for (int r = 0; r < 8; r++) {
    const float upper = shared_at<float>(rows + staged_offset<kColumns>(r, column))[0];
    const float lower = shared_at<float>(rows + staged_offset<kColumns>(r + 8, column))[0];
    sum[r] = upper + lower;
  }
  AK_UNROLL
  for (int apart = 1; apart < 8; apart *= 2) {
    AK_UNROLL
    for (int r = 0; r < 8; r += 2 * apart) sum[r] += sum[r + apart];
  }
  return sum[0];
}

// ---- the epilogue.

/// Finishes a consumer's accumulators and stores the results. With swiglu half of a warp's staged columns are gates:
/// forward the others are their values, backward the gradients of the values find room there.
template <bool kFloat, class Tile>
AK_DEVICE void finish_elements(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], uint32_t staging,
                               const Work& work, const Args& args) {
  constexpr int kColumns = staged_columns<kFloat, Tile>();
  const Epilogue& e = args.epilogue;
  // From what it takes: no register of the main loop is kept for what is soon computed again. Beside three consumers
  // there is none either from one part of the tile to the next.
  const int thread0 = opaque(thread_index()), batch0 = opaque(work.batch), n0 = opaque(work.n);
  const auto kept = [](int x) { return Tile::kConsumers == 3 ? opaque(x) : x; };
  AK_NO_UNROLL
  for (int i = 0;; i++) {
    const auto thread = static_cast<uint32_t>(kept(thread0)) - kWarpgroupThreads;  // without the producer
    const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, consumer = thread / kWarpgroupThreads;
    const int batch = kept(batch0), n = kept(n0);
    const bool backward = e.preact.data != nullptr, gated = e.activation == Activation::swiglu,
               halved = gated && !backward;
    const int log_width = gated ? log2(kColumns / 2) : log2(kColumns), width = 1 << log_width;
    const int value = halved ? args.n / 2 : args.n;  // columns from a gate to its value
    const int end = n + args.tile_columns < args.columns ? n + args.tile_columns : args.columns;
    const int parts = (end - n + width - 1) >> log_width;
    const uint32_t staged = staging + consumer * staging_bytes<kFloat, Tile>() + warp % 4 * 16 * kColumns * 4;
    const int slice = Tile::kSlicesM > 1 && i >= parts, first = (i - slice * parts) * width, column0 = n + first;
    const int row0 = work.m + (Tile::kPingpong ? 0 : consumer * Tile::kConsumerRows) + slice * 64 + warp % 4 * 16,
              rows = args.m - row0 < 16 ? args.m - row0 : 16;
    if (i == Tile::kSlicesM * parts || rows <= 0) return;
    warp_sync();  // the columns in front have been read
    if (!gated) {
      stage_sums<kColumns, kColumns, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    } else if (backward) {
      stage_sums<kColumns, kColumns / 2, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    } else if constexpr (Tile::kBlockN % 128 == 0) {
      stage_sums<kColumns, kColumns / 2, true, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    }
    warp_sync();
    // A thread's elements: column x + x0, of the rows r0, r0 + row_step and so on.
    const int shift = log_width < 5 ? log_width : 5;
    const bool by_columns = e.c.column_bytes > 4;  // neighbours in memory are neighbours in a column
    const int x0 = by_columns ? lane / 16 : lane & ((1 << shift) - 1), x_step = by_columns ? 2 : 1 << shift;
    const int r0 = by_columns ? lane % 16 : lane >> shift, row_step = opaque(by_columns ? 16 : kWarpThreads >> shift);
    AK_NO_UNROLL
    for (int x = x0; x < width; x += x_step) {
      const int column = column0 + x, last = column < end ? rows : 0;
      // An operand's column, `further` on; an element of it.
      const auto at = [&](const Operand& t, int further) {
        return address_in(t, &t == &e.bias ? 0 : batch, row0, column + further);
      };
      const auto element = [&](const Operand& t, const char* top, int r) {
        return load_element(t.type, top + r * t.row_bytes);
      };
      char* const c_top = opaque(at(e.c, 0));
      const char* const bias_top = opaque(at(e.bias, 0));
      AK_NO_UNROLL
      for (int r = r0; r < 16; r += row_step) {
        const auto place = [&](int further) { return staged + staged_offset<kColumns>(r, x + further); };
        const auto keep = [&](int further, float x) { store_shared_4(place(further), bits_of(x)); };
        if (r >= last) {  // there are none below
          if (e.column_sums) keep(0, 0.0f);
          if (e.column_sums && gated) keep(kColumns / 2, 0.0f);
          continue;
        }
        // z = alpha (A B) + bias
        const auto preactivation = [&](int staged_further, int further) {
          const float sum = shared_at<float>(place(staged_further))[0];
          const float bias = e.bias.data ? element(e.bias, further ? at(e.bias, further) : bias_top, r) : -0.0f;
          const float z = fma(e.alpha, sum, bias);
          if (e.z.data) store_element(e.z.type, at(e.z, further) + r * e.z.row_bytes, z);
          return z;
        };
        float v = preactivation(0, 0);
        if (halved) {
          v = swiglu(v, preactivation(kColumns / 2, value));
        } else if (!backward) {
          if (e.activation != Activation::none) v = activate(e.activation, v);
        } else if (gated) {
          const GatedGradient g =
              swiglu_backward(v, element(e.preact, at(e.preact, 0), r), element(e.preact, at(e.preact, value), r));
          v = g.gate;
          store_element(e.c.type, at(e.c, value) + r * e.c.row_bytes, g.up);
          if (e.column_sums) keep(kColumns / 2, g.up);
        } else {
          v = activate_backward(e.activation, v, element(e.preact, at(e.preact, 0), r));
        }
        if (backward && e.column_sums) keep(0, v);
        if (e.residual.data) v = fma(e.beta, element(e.residual, at(e.residual, 0), r), v);
        store_element(e.c.type, c_top + r * e.c.row_bytes, v);
      }
    }
    if (!backward || !e.column_sums) continue;
    warp_sync();
    const int64_t groups = (args.m + 15) / 16, pitch = gated ? 2 * args.n : args.n;
    float* const sums = e.column_sums + (batch * groups + row0 / 16) * pitch;
    AK_NO_UNROLL
    for (int x = lane; x < kColumns; x += kWarpThreads) {
      const int column = column0 + (x & (width - 1));
      if (column < end) store(sums + column + (x < width ? 0 : value), sum_of_rows<kColumns>(staged, x));
    }
  }
}

}  // namespace gemm
}  // namespace ak
