// Elementwise epilogue of gemm_sm90, for a C or operands that TMA cannot move: any type, stride and alignment.
//
// Work: one pass over a consumer's fp32 sums and over the operands. Plan: each warp stages 16 rows of up to 64 columns
// of sums in its share of the staging buffer and reads them back row by row, or column by column if C is column-major,
// so that its global accesses coalesce. Traps: registers cannot be indexed dynamically, so an unrolled loop with a
// uniform branch selects the accumulators to stage; a dynamic index would cost a select per register. Warps work
// independently, so warp_sync() orders writes and reads of the buffer.
#pragma once
#include "base/element.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/warp.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int log2(int x) { return x == 1 ? 0 : 1 + log2(x / 2); }

// ---- staged rows of a warp: 16 rows of kColumns sums.

/// Swizzled byte offset of a value. Groups of 8 columns (32 bytes) are permuted by row and the halves of a group by its
/// position, so that neither 8-byte writes to 8 rows nor 16-byte reads along a row conflict in banks.
/// offset(row + 8 r, column) = offset(row, column) + 8 r rows; offset(row, column ^ x) = offset(row, column) ^
/// offset(0, x).
template <int kColumns>
AK_DEVICE constexpr uint32_t staged_offset(uint32_t row, uint32_t column) {
  const uint32_t plain = (row * kColumns + column) * 4,
                 moved = plain ^ ((row % (kColumns / 8 < 4 ? kColumns / 8 : 4)) << 5);
  return moved ^ ((moved >> 3) & 16);
}

/// Stages kWidth columns of a slice's sums from column `first` on; with kTwice also the kWidth columns half a tile
/// later, after them. `rows` is a multiple of 256 bytes.
template <int kColumns, int kWidth, bool kTwice, int kSlices, int kBlockN>
AK_DEVICE void stage_sums(const float (&acc)[kSlices][kBlockN / 2], uint32_t rows, int slice, int first) {
  constexpr int kParts = ((kTwice ? kBlockN / 2 : kBlockN) + kWidth - 1) / kWidth;
  const uint32_t mine = rows + staged_offset<kColumns>(lane_in_warp() / 4, lane_in_warp() % 4 * 2);
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

/// Sum of a column of 16 staged rows, in the order shared by all kernels that write column sums.
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

/// Runs the epilogue of a consumer's accumulators and stores the results. With swiglu half of the staged columns are
/// gates; the other half are their values (forward) or space for the values' gradients (backward).
template <bool kFloat, class Tile>
AK_DEVICE void run_elementwise_epilogue(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], uint32_t staging,
                                        const Work& work, const Args& args) {
  constexpr int kColumns = staged_columns<kFloat, Tile>();
  const Epilogue& e = args.epilogue;
  // Opaque inputs: everything is recomputed here and holds no register during the main loop. With three consumers there
  // are no registers to keep values between iterations either.
  const int thread0 = opaque(thread_index()), batch0 = opaque(work.batch), n0 = opaque(work.n);
  const auto recomputed = [](int x) { return Tile::kConsumers == 3 ? opaque(x) : x; };
  AK_NO_UNROLL
  for (int i = 0;; i++) {
    const auto thread = static_cast<uint32_t>(recomputed(thread0)) - kWarpgroupThreads;  // without the producer
    const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, consumer = thread / kWarpgroupThreads;
    const int batch = recomputed(batch0), n = recomputed(n0), end_m = end_of_rows<Tile>(args, work);
    const bool backward = e.preact.data != nullptr, gated = e.activation == Activation::swiglu,
               halved = gated && !backward;
    const int log_width = gated ? log2(kColumns / 2) : log2(kColumns), width = 1 << log_width;
    const int value_offset = halved ? args.n / 2 : args.n;  // columns from gate to value
    const int end = n + args.tile_columns < args.columns ? n + args.tile_columns : args.columns;
    const int parts = (end - n + width - 1) >> log_width;
    const uint32_t staged = staging + consumer * staging_bytes<kFloat, Tile>() + warp % 4 * 16 * kColumns * 4;
    const int slice = Tile::kSlicesM > 1 && i >= parts, first = (i - slice * parts) * width, column0 = n + first;
    const int row0 = work.m + (Tile::kPingpong ? 0 : consumer * Tile::kConsumerRows) + slice * 64 + warp % 4 * 16,
              rows = end_m - row0 < 16 ? end_m - row0 : 16;
    if (i == Tile::kSlicesM * parts || rows <= 0) return;
    warp_sync();  // the previous columns have been read
    if (!gated) {
      stage_sums<kColumns, kColumns, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    } else if (backward) {
      stage_sums<kColumns, kColumns / 2, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    } else if constexpr (Tile::kBlockN % 128 == 0) {
      stage_sums<kColumns, kColumns / 2, true, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
    }
    warp_sync();
    // A thread's elements: columns x0, x0 + x_step, ..., rows r0, r0 + row_step, ...
    const int shift = log_width < 5 ? log_width : 5;
    const bool by_columns = e.c.column_bytes > 4;  // column-major C
    const int x0 = by_columns ? lane / 16 : lane & ((1 << shift) - 1), x_step = by_columns ? 2 : 1 << shift;
    const int r0 = by_columns ? lane % 16 : lane >> shift, row_step = opaque(by_columns ? 16 : kWarpThreads >> shift);
    AK_NO_UNROLL
    for (int x = x0; x < width; x += x_step) {
      const int column = column0 + x, last = column < end ? rows : 0;
      // Top of an operand's column, `offset` columns to the right; an element below it.
      const auto at = [&](const Operand& t, int offset) {
        return address_in(t, &t == &e.bias && !Tile::kRowGroups ? 0 : batch, row0, column + offset);
      };
      const auto element = [&](const Operand& t, const char* top, int r) {
        return load_element(t.type, top + r * t.row_bytes);
      };
      char* const c_top = opaque(at(e.c, 0));
      const char* const bias_top = opaque(at(e.bias, 0));
      AK_NO_UNROLL
      for (int r = r0; r < 16; r += row_step) {
        const auto staged_at = [&](int offset) { return staged + staged_offset<kColumns>(r, x + offset); };
        const auto stage = [&](int offset, float x) { store_shared_4(staged_at(offset), bits_of(x)); };
        if (r >= last) {  // out of bounds
          if (e.column_sums) stage(0, 0.0f);
          if (e.column_sums && gated) stage(kColumns / 2, 0.0f);
          continue;
        }
        // z = alpha (A B) + bias
        const auto preactivation = [&](int stage_offset, int offset) {
          const float sum = shared_at<float>(staged_at(stage_offset))[0];
          const float bias =
              bias_of_tile<Tile>(args, batch) ? element(e.bias, offset ? at(e.bias, offset) : bias_top, r) : -0.0f;
          const float z = fma(e.alpha, sum, bias);
          if (e.z.data) store_element(e.z.type, at(e.z, offset) + r * e.z.row_bytes, z);
          return z;
        };
        float v = preactivation(0, 0);
        if (halved) {
          v = swiglu(v, preactivation(kColumns / 2, value_offset));
        } else if (!backward) {
          if (e.activation != Activation::none) v = activate(e.activation, v);
        } else if (gated) {
          const GatedGradient g = swiglu_backward(v, element(e.preact, at(e.preact, 0), r),
                                                  element(e.preact, at(e.preact, value_offset), r));
          v = g.gate;
          store_element(e.c.type, at(e.c, value_offset) + r * e.c.row_bytes, g.up);
          if (e.column_sums) stage(kColumns / 2, g.up);
        } else {
          v = activate_backward(e.activation, v, element(e.preact, at(e.preact, 0), r));
        }
        if (backward && e.column_sums) stage(0, v);
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
      if (column < end) store(sums + column + (x < width ? 0 : value_offset), sum_of_rows<kColumns>(staged, x));
    }
  }
}

}  // namespace gemm
}  // namespace ak
