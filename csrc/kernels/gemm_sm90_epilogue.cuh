// The epilogue of gemm_sm90: activations, their derivatives, residual, pre-activation, column sums.
//
// Work: one pass over a consumer's sums in fp32, and over the operands beside them. Plan: the sums leave the registers
// as fp32, 16 rows and up to 64 columns of a warp at a time, through the warp's share of the staging buffer, and come
// back row by row: a thread then has neighbours of 16 bytes of C, a warp whole lines of C and of every operand, and one
// copy of the code serves all tiles. What is read is fetched one item ahead. Where C or an operand cannot move in 16
// bytes, the same code takes single elements. Columns beyond C's are not worked on. Traps: the sums are read where an
// unrolled loop stores them, behind a branch that all threads take together: picked into other registers by number,
// they cost a select for each. Warps are on their own, so warp_sync() orders who writes the buffer and who reads it.
#pragma once
#include <algorithm>

#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/warp.cuh"
#include "kernels/gemm_sm90_tile.cuh"

namespace ak {
namespace gemm {

// ---- neighbours in a row of an operand: kCount of them, as they lie in memory and as fp32. A single one may be of any
// type and anywhere; several are aligned, and of T, or of fp32 where that is no more than 16 bytes.

template <int kCount>
struct Raw {
  uint32_t words[kCount < 4 ? kCount : 4];
};
template <int kCount>
inline constexpr bool kFloatsFit = kCount <= 4;

AK_DEVICE int64_t product(int x, int y) { return static_cast<int64_t>(x) * y; }

/// `p`, `rows` further down.
template <int kCount>
AK_DEVICE char* below(char* p, const Operand& t, int rows) {
  return p + (kCount == 1 ? rows * t.row_bytes : product(rows, t.row_narrow));
}

/// `p`, `columns` further right.
template <int kCount>
AK_DEVICE char* beside(char* p, const Operand& t, int columns) {
  return p + (kCount == 1 ? columns * t.column_bytes : product(columns, t.column_narrow));
}

/// Address of (row, column) in matrix `batch`.
template <int kCount>
AK_DEVICE char* address(const Operand& t, int batch, int row, int column) {
  if constexpr (kCount == 1) return t.data + batch * t.batch_bytes + row * t.row_bytes + column * t.column_bytes;
  return t.data + product(batch, t.batch_narrow) + product(row, t.row_narrow) + product(column, t.column_narrow);
}

template <int kCount>
AK_DEVICE Raw<kCount> load_raw(DType type, const char* p) {
  Raw<kCount> raw{};
  const auto words = [&](auto v, int count) {
    AK_UNROLL
    for (int i = 0; i < count; i++) raw.words[i] = v[i];
  };
  if (kFloatsFit<kCount> && type == DType::kFloat32) {
    if constexpr (kFloatsFit<kCount>) words(load_vec<kCount>(reinterpret_cast<const uint32_t*>(p)), kCount);
  } else if constexpr (kCount == 1) {
    raw.words[0] = load(reinterpret_cast<const uint16_t*>(p));
  } else {
    words(load_vec<kCount / 2>(reinterpret_cast<const uint32_t*>(p)), kCount / 2);
  }
  return raw;
}

template <class T, int kCount>
AK_DEVICE void widen(DType type, const Raw<kCount>& raw, float (&v)[kCount]) {
  if (kFloatsFit<kCount> && type == DType::kFloat32) {
    if constexpr (kFloatsFit<kCount>) {
      AK_UNROLL
      for (int i = 0; i < kCount; i++) v[i] = float_of(raw.words[i]);
    }
  } else if constexpr (kCount == 1) {
    const auto bits = static_cast<uint16_t>(raw.words[0]);
    v[0] = type == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(fp16{bits});
  } else {
    AK_UNROLL
    for (int i = 0; i < kCount; i++) v[i] = to_float(T{static_cast<uint16_t>(raw.words[i / 2] >> (16 * (i % 2)))});
  }
}

/// Those of the bias, which may be of fp32 in any case.
template <class T, int kCount>
AK_DEVICE void load_bias(DType type, const char* p, float (&v)[kCount]) {
  if (!kFloatsFit<kCount> && type == DType::kFloat32) {
    const auto values = load_vec<kCount>(reinterpret_cast<const float*>(p));
    AK_UNROLL
    for (int i = 0; i < kCount; i++) v[i] = values[i];
  } else {
    widen<T>(type, load_raw<kCount>(type, p), v);
  }
}

/// Rounds to `type` and stores.
template <class T, int kCount>
AK_DEVICE void store_rounded(DType type, char* p, const float (&v)[kCount]) {
  if (kFloatsFit<kCount> && type == DType::kFloat32) {
    Vec<float, kCount> out;
    AK_UNROLL
    for (int i = 0; i < kCount; i++) out[i] = v[i];
    store_vec(reinterpret_cast<float*>(p), out);
  } else if constexpr (kCount == 1) {
    store(reinterpret_cast<uint16_t*>(p),
          type == DType::kBFloat16 ? round_to<bf16>(v[0]).bits : round_to<fp16>(v[0]).bits);
  } else {
    Vec<uint32_t, kCount / 2> out;
    AK_UNROLL
    for (int i = 0; i < kCount / 2; i++) out[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
    store_vec(reinterpret_cast<uint32_t*>(p), out);
  }
}

constexpr int log2(int x) { return x == 1 ? 0 : 1 + log2(x / 2); }

// ---- the staged rows of a warp: 16 rows of kColumns sums.

/// Byte offset of a value. The groups of 8 columns, 32 bytes, change places with the row, and the halves of a group
/// with its place, so that neither threads that write 8 bytes each of 8 rows meet in a bank, nor those that read 16
/// bytes each of a row. Of row + 8 r, column: 8 r rows further on; of row, column ^ x: the xor with that of 0, x.
template <int kColumns>
AK_DEVICE constexpr uint32_t staged_offset(int row, int column) {
  const uint32_t plain = (row * kColumns + column) * 4,
                 moved = plain ^ ((row % (kColumns / 8 < 4 ? kColumns / 8 : 4)) << 5);
  return moved ^ ((moved >> 3) & 16);
}

/// Writes those sums of a slice to the staged rows that begin with column `first`, kWidth columns. With kTwice also
/// those half a tile further on, behind them. A warp's `rows` begin at a multiple of 256 bytes.
template <int kColumns, int kWidth, bool kTwice, int kSlices, int kBlockN>
AK_DEVICE void stage_sums(const float (&acc)[kSlices][kBlockN / 2], uint32_t rows, int slice, int first) {
  constexpr int kParts = ((kTwice ? kBlockN / 2 : kBlockN) + kWidth - 1) / kWidth;
  const uint32_t mine = rows + staged_offset<kColumns>(lane_index() / 4, lane_index() % 4 * 2);
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

template <int kCount>
AK_DEVICE void load_staged(uint32_t at, float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    v[0] = shared_at<float>(at)[0];
  } else {
    AK_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      const auto four = load_shared_16(at ^ (i * 4));
      AK_UNROLL
      for (int e = 0; e < 4; e++) v[i + e] = float_of(four[e]);
    }
  }
}

template <int kCount>
AK_DEVICE void store_staged(uint32_t at, const float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    store_shared_4(at, bits_of(v[0]));
  } else {
    AK_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      store_shared_16(at ^ (i * 4), {{bits_of(v[i]), bits_of(v[i + 1]), bits_of(v[i + 2]), bits_of(v[i + 3])}});
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

template <int kCount>
AK_DEVICE void activate(Activation activation, float (&v)[kCount]) {
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kCount; i++) v[i] = f(v[i]);
  };
  switch (activation) {
    case Activation::relu:
      return each([](float x) { return ak::activate(Activation::relu, x); });
    case Activation::gelu:
      return each([](float x) { return ak::activate(Activation::gelu, x); });
    case Activation::gelu_tanh:
      return each([](float x) { return ak::activate(Activation::gelu_tanh, x); });
    case Activation::silu:
      return each([](float x) { return ak::activate(Activation::silu, x); });
    case Activation::none:
    case Activation::swiglu:
      return;
  }
}

template <int kCount>
AK_DEVICE void activate_backward(Activation activation, float (&v)[kCount], const float (&z)[kCount]) {
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kCount; i++) v[i] = f(v[i], z[i]);
  };
  switch (activation) {
    case Activation::relu:
      return each([](float x, float y) { return ak::activate_backward(Activation::relu, x, y); });
    case Activation::gelu:
      return each([](float x, float y) { return ak::activate_backward(Activation::gelu, x, y); });
    case Activation::gelu_tanh:
      return each([](float x, float y) { return ak::activate_backward(Activation::gelu_tanh, x, y); });
    case Activation::silu:
      return each([](float x, float y) { return ak::activate_backward(Activation::silu, x, y); });
    case Activation::none:
    case Activation::swiglu:
      return;
  }
}

/// Finishes a consumer's accumulators and stores the results, kCount neighbours at a time. With swiglu half of a warp's
/// staged columns are gates: forward the others are their values, backward the gradients of the values find room there.
/// For the registers it is known at compile time what several neighbours need: forward, or backward with nothing beside
/// it but `preact`. Single elements take anything.
template <class T, bool kFloat, bool kBackward, int kCount, class Tile>
AK_DEVICE void finish_tile(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], uint32_t staging, const Work& work,
                           const Args& args) {
  constexpr int kColumns = staged_columns<kFloat, Tile>();
  // Threads for a row, as a power of two.
  constexpr int kInRow = log2(std::min(kColumns / kCount, kWarpThreads)),
                kInHalfRow = log2(std::min(kColumns / 2 / kCount, kWarpThreads));
  constexpr bool kBoth = kCount == 1, kForward = kBoth || !kBackward;
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
    const bool backward = kBoth ? e.preact.data != nullptr : kBackward;
    const bool gated = e.activation == Activation::swiglu, halved = gated && !backward;
    const int width = gated ? kColumns / 2 : kColumns;  // columns of C worked on together
    const int value = halved ? args.n / 2 : args.n;     // columns from a gate to its value
    const int end = n + args.tile_columns < args.columns ? n + args.tile_columns : args.columns;
    const int parts = (end - n + width - 1) >> (gated ? log2(kColumns / 2) : log2(kColumns));
    const uint32_t staged = staging + consumer * staging_bytes<kFloat, Tile>() + warp % 4 * 16 * kColumns * 4;
    // A thread's items: kCount columns from x + x0 on, of the rows r0, r0 + row_step and so on.
    int x0, x_step, r0, row_step;
    if (kCount == 1 && e.c.column_bytes > 4) {  // neighbours in memory are neighbours in a column
      x0 = lane / 16, x_step = 2, r0 = lane % 16, row_step = 16;
    } else {
      const int shift = gated ? kInHalfRow : kInRow, in_row = 1 << shift;
      x0 = (lane & (in_row - 1)) * kCount, x_step = in_row * kCount;
      r0 = lane >> shift, row_step = opaque(kWarpThreads >> shift);
    }
    const int slice = Tile::kSlicesM > 1 && i >= parts, first = (i - slice * parts) * width, column0 = n + first;
    const int row0 = work.m + (Tile::kPingpong ? 0 : consumer * Tile::kConsumerRows) + slice * 64 + warp % 4 * 16,
              rows = args.m - row0 < 16 ? args.m - row0 : 16;
    if (i == Tile::kSlicesM * parts || rows <= 0) return;
    AK_NO_UNROLL
    for (int x = 0; x < (kCount == 1 ? width : 1); x += x_step) {
      const int column = column0 + x + x0;
      const int last = column < end ? rows : 0;
      const auto line = [&](const Operand& t, int further) {
        return beside<kCount>(opaque(address<kCount>(t, batch, row0, 0)), t, column + further);
      };
      const auto load_line = [&](const Operand& t, char* from, int r) {
        return load_raw<kCount>(t.type, below<kCount>(from, t, r));
      };
      const auto store_line = [&](const Operand& t, char* to, int r, const float (&v)[kCount]) {
        store_rounded<T>(t.type, below<kCount>(to, t, r), v);
      };
      char* const residual_line = kForward ? opaque(line(e.residual, 0)) : nullptr;
      char* const gate_line = kBackward || kBoth ? opaque(line(e.preact, 0)) : nullptr;
      char* const c_line = opaque(line(e.c, 0));
      Raw<kCount> residual{}, gate{};
      const auto fetch_residual = [&](int r) {
        if (kForward && e.residual.data && r < last) residual = load_line(e.residual, residual_line, r);
      };
      const auto fetch_preact = [&](int r) {
        if (backward && r < last) gate = load_line(e.preact, gate_line, r);
      };
      const auto add_bias = [&](const float (&bias)[kCount], float (&v)[kCount]) {
        AK_UNROLL
        for (int i = 0; i < kCount; i++) v[i] += bias[i];
      };
      fetch_residual(r0);
      fetch_preact(r0);
      float bias[kCount] = {};
      const auto bias_at = [&](int r, int further) {  // one for all rows, but for single elements
        if constexpr (kCount == 1) return address<1>(e.bias, 0, row0 + r, column + further);
        return beside<kCount>(opaque(e.bias.data), e.bias, column + further);
      };
      const auto fetch_bias = [&](int r, int further) { load_bias<T>(e.bias.type, bias_at(r, further), bias); };
      if (kCount > 1 && kForward && e.bias.data && r0 < last) fetch_bias(0, 0);

      if (x == 0) {
        warp_sync();  // the columns in front have been read
        if (!gated) {
          stage_sums<kColumns, kColumns, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
        } else if (backward) {
          stage_sums<kColumns, kColumns / 2, false, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
        } else if constexpr (Tile::kBlockN % 128 == 0) {
          stage_sums<kColumns, kColumns / 2, true, Tile::kSlicesM, Tile::kBlockN>(acc, staged, slice, first);
        }
        warp_sync();
      }

      // Where an item lies in the staged rows; 8 neighbours move by rows of 4, which turns nothing.
      const uint32_t item = staged + staged_offset<kColumns>(r0, x + x0),
                     value_item = staged + staged_offset<kColumns>(r0, x + x0 + kColumns / 2);
      uint32_t down = 0;
      const auto place = [&](uint32_t first, int further, int r) {
        if constexpr (kCount == 8) return first + down;
        return staged + staged_offset<kColumns>(r, x + x0 + further);
      };
      const bool keeps_z = kForward && e.extras && e.z.data;
      int next;
      AK_NO_UNROLL
      for (int r = r0; r < last; r = next, down += row_step * kColumns * 4) {
        next = r + row_step;
        // z = alpha (A B) + bias
        const auto scale = [&](float (&v)[kCount]) {
          if (!e.extras) return;
          AK_UNROLL
          for (int i = 0; i < kCount; i++) v[i] = e.alpha * v[i];
        };
        float v[kCount];
        load_staged(place(item, 0, r), v);
        scale(v);
        if (kForward && e.bias.data) {
          if (kCount == 1) fetch_bias(r, 0);
          add_bias(bias, v);
        }
        if (keeps_z) store_line(e.z, line(e.z, 0), r, v);
        if (halved) {
          float w[kCount];
          load_staged(place(value_item, kColumns / 2, r), w);
          scale(w);
          if (e.bias.data) {
            float value_bias[kCount];
            load_bias<T>(e.bias.type, bias_at(r, value), value_bias);
            add_bias(value_bias, w);
          }
          if (keeps_z) store_line(e.z, line(e.z, value), r, w);
          AK_UNROLL
          for (int i = 0; i < kCount; i++) v[i] = swiglu(v[i], w[i]);
        } else if (!backward) {
          if (e.activation != Activation::none) activate(e.activation, v);
        } else {
          float z[kCount];
          widen<T>(e.preact.type, gate, z);
          if (gated) {
            float up_z[kCount];
            widen<T>(e.preact.type, load_line(e.preact, line(e.preact, value), r), up_z);
            AK_UNROLL
            for (int i = 0; i < kCount; i++) {
              const GatedGradient g = swiglu_backward(v[i], z[i], up_z[i]);
              v[i] = g.gate;
              up_z[i] = g.up;
            }
            store_line(e.c, line(e.c, value), r, up_z);
            if (e.column_sums) store_staged(place(value_item, kColumns / 2, r), up_z);
          } else {
            activate_backward(e.activation, v, z);
          }
          fetch_preact(next);
          if (e.column_sums) store_staged(place(item, 0, r), v);
        }
        if (kForward && e.residual.data) {
          float added[kCount];
          widen<T>(e.residual.type, residual, added);
          AK_UNROLL
          for (int i = 0; i < kCount; i++) v[i] = fma(e.beta, added[i], v[i]);
          fetch_residual(next);
        }
        store_line(e.c, c_line, r, v);
      }
    }

    if (!backward || !e.column_sums) continue;
    AK_NO_UNROLL
    for (int r = rows; r < 16; r++) {  // there are none below
      for (int x = lane; x < kColumns; x += kWarpThreads)
        store_staged<1>(staged + staged_offset<kColumns>(r, x), {0.0f});
    }
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
