// TMA epilogue of gemm_sm90: activations, their derivatives, residual, column sums. TMA moves C and the auxiliary input
// (residual or pre-activation).
//
// Work: one pass over a consumer's fp32 sums, and one read of the auxiliary tile. Plan: TMA loads the auxiliary tile
// into the consumer's staging buffer, in boxes of 64 rows of 128 bytes or, for widths that these do not divide, up to
// four boxes of 32 bytes. The first boxes load during the main loop, and the whole tile is prefetched into L2 by then.
// Boxes have the layout of stmatrix, so ldmatrix loads each thread's values in accumulator order; the results overwrite
// them and are stored by TMA. The consumer's scheduler warp (producer.cuh) issues all loads and stores. It alternates
// two slots: the consumer works on one while the other is stored and refilled. The pairs of swiglu's backward occupy
// both slots, so there every load but the first is exposed. The consumer works on chunks of 32 columns in a rolled
// loop. Registers cannot be indexed dynamically, so a uniform branch selects the chunk; the fma with alpha and bias,
// needed anyway, doubles as the register move. Traps: a slot may be refilled only when its store has read it, and only
// the thread that issued the store can wait for that. Rows out of bounds are zero times B, which may be NaN, so column
// sums skip them.
#pragma once
#include "device/block.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "device/warp.cuh"
#include "gemm/sm90/direct_store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int kChunk = 32;  // columns

/// Boxes of a consumer's part of a tile: slice by slice, from left to right, in steps of 128 bytes per row (one box or
/// several narrow ones). With `pairs` a step has a box of gates and a box of values, which are two matrices of the map.
template <bool kFloat, class Tile>
struct TileBoxes {
  static constexpr int kColumns = kFloat ? 32 : 64, kBoxColumns = kFloat ? 32 : Tile::kBoxColumns;
  static constexpr int kBoxBytes = kSliceBytes / (kColumns / kBoxColumns);
  int m, n, batch;  ///< first row and column in C
  int aux_batch;    ///< matrix of the auxiliary map
  int end;          ///< row at which the tile's rows end
  int columns;      ///< of the tile within C
  int steps_per_slice, steps;
  bool pairs;

  /// Opaque inputs: everything is recomputed here and holds no register during the main loop.
  AK_DEVICE TileBoxes(const Args& args, const Work& work, int consumer)
      : m(opaque(work.m) + (Tile::kPingpong ? 0 : opaque(consumer) * Tile::kConsumerRows)),
        n(opaque(work.n)),
        batch(opaque(work.batch)),
        aux_batch(batch * args.aux_batched),
        end(end_of_rows<Tile>(args, work)) {
    static_assert(Tile::kSlicesM <= 2, "a consumer has one slice or two");
    columns = args.columns - n < args.tile_columns ? args.columns - n : args.tile_columns;
    const int slices = m >= end ? 0 : Tile::kSlicesM == 1 || m + 64 >= end ? 1 : 2;
    steps_per_slice = columns <= 0 ? 0 : (columns + kColumns - 1) / kColumns;
    steps = slices * steps_per_slice;
    pairs = !kFloat && args.epilogue.activation == Activation::swiglu && args.epilogue.preact.data;
  }
  AK_DEVICE int slice(int step) const { return Tile::kSlicesM > 1 && step >= steps_per_slice; }
  AK_DEVICE int index_in_slice(int step) const { return step - slice(step) * steps_per_slice; }
  AK_DEVICE int first_column(int step) const { return index_in_slice(step) * kColumns; }  ///< of the tile
  AK_DEVICE int row(int step) const { return m + slice(step) * 64; }
  /// First column of the chunk after the one at `column`; unspecified at the tile's end.
  AK_DEVICE int next_chunk(int column) const {
    return Tile::kSlicesM == 1 || column + kChunk < columns ? column + kChunk : 0;
  }
  AK_DEVICE int slot(int step) const { return pairs ? 0 : step % 2; }
  AK_DEVICE int steps_in_flight() const { return pairs ? 1 : 2; }  ///< steps that fit into the slots

  /// Boxes of a step. Narrow boxes end at the tile's edge, since the next one belongs to another tile.
  AK_DEVICE int boxes(int step) const {
    if (kBoxColumns == kColumns) return 1;
    const int left = columns - first_column(step);
    return left < kColumns ? (left + kBoxColumns - 1) / kBoxColumns : kColumns / kBoxColumns;
  }
  /// Calls f(first column in C, byte offset in the slot) for each box of a step.
  template <class F>
  AK_DEVICE void each_box(int step, F f) const {
    AK_NO_UNROLL
    for (int i = 0; i < boxes(step); i++) f(n + first_column(step) + i * kBoxColumns, i * kBoxBytes);
  }

  /// Prefetches the whole auxiliary tile into L2. `end_m`: rows of the matrix.
  AK_DEVICE void prefetch(const TensorMap* map, int end_m) const {
    AK_UNROLL
    for (int slice = 0; slice < Tile::kSlicesM; slice++) {
      const int y = m + slice * 64;
      if (y >= end_m) return;
      AK_NO_UNROLL
      for (int x = n; x < n + columns; x += kBoxColumns) {
        tma_prefetch(map, x, y, aux_batch);
        if (pairs) tma_prefetch(map, x, y, 1);
      }
    }
  }
  /// Loads a step into its slot, which must be free, and signals `barrier`.
  AK_DEVICE void load(const TensorMap* map, uint32_t slots, uint32_t barrier, int step) const {
    const uint32_t slot_at = slots + slot(step) * kSliceBytes;
    mbarrier_arrive_expect_tx(barrier, boxes(step) * (pairs ? 2 * kBoxBytes : kBoxBytes));
    each_box(step, [&](int x, uint32_t offset) {
      tma_load(slot_at + offset, map, barrier, x, row(step), aux_batch);
      if (pairs) tma_load(slot_at + kSliceBytes + offset, map, barrier, x, row(step), 1);
    });
  }
  AK_DEVICE void store(const TensorMap* map, uint32_t slots, int step) const {
    const uint32_t slot_at = slots + slot(step) * kSliceBytes;
    each_box(step, [&](int x, uint32_t offset) {
      store_box<Tile>(map, slot_at + offset, x, row(step), batch, end);
      if (pairs) tma_store(map, slot_at + kSliceBytes + offset, x, row(step), 1);
    });
    bulk_commit();
  }
};

// ---- scheduler warp's side: fill slots, store finished ones.

/// Waits until the stores have read the slot of a step, then loads it or hands it over as it is.
template <bool kFloat, class Tile>
AK_DEVICE void fill_slot(const TileBoxes<kFloat, Tile>& boxes, const TensorMap* map_aux, uint32_t slots,
                         Mailbox mailbox, bool reads_aux, int step) {
  const uint32_t barrier = mailbox.slot_ready(boxes.slot(step));
  bulk_wait_read<0>();
  if (reads_aux) {
    boxes.load(map_aux, slots, barrier, step);
  } else {
    mbarrier_arrive(barrier);
  }
}

template <bool kFloat, class Tile>
AK_DEVICE void fill_first_slots(const TileBoxes<kFloat, Tile>& boxes, const TensorMap* map_aux, uint32_t slots,
                                Mailbox mailbox, bool reads_aux) {
  AK_NO_UNROLL
  for (int step = 0; step < boxes.steps_in_flight() && step < boxes.steps; step++)
    fill_slot(boxes, map_aux, slots, mailbox, reads_aux, step);
}

/// Stores every step when the consumer is done with it, and refills its slot. `phases`: phase bits of slot_done().
template <bool kFloat, class Tile>
AK_DEVICE void store_and_refill_slots(const TileBoxes<kFloat, Tile>& boxes, const TensorMap* map_c,
                                      const TensorMap* map_aux, uint32_t slots, Mailbox mailbox, bool reads_aux,
                                      uint32_t& phases) {
  AK_NO_UNROLL
  for (int step = 0; step < boxes.steps; step++) {
    const int slot = boxes.slot(step), next = step + boxes.steps_in_flight();
    mbarrier_wait(mailbox.slot_done(slot), phases >> slot & 1);
    phases ^= 1 << slot;
    boxes.store(map_c, slots, step);
    if (next < boxes.steps) fill_slot(boxes, map_aux, slots, mailbox, reads_aux, next);
  }
}

// ---- a thread's values of a chunk: twice 16 columns.

constexpr int kValues = 64 * kChunk / kWarpgroupThreads;

template <class T, bool kFloat>
AK_DEVICE void read_half(uint32_t at, float* v) {
  if constexpr (kFloat) {
    AK_UNROLL
    for (int i = 0; i < 8; i += 2) {
      const auto pair = load_shared_2((at ^ (i / 4 << 5)) + i / 2 % 2 * 1024);
      v[i] = pair[0], v[i + 1] = pair[1];
    }
  } else {
    uint32_t r[4];
    ldmatrix_x4(r, at);
    AK_UNROLL
    for (int i = 0; i < 4; i++) widen_pair<T>(r[i], v[2 * i], v[2 * i + 1]);
  }
}

/// Reads half of a chunk that has `columns` columns in bounds. A narrow box beyond them was not loaded and reads as 0.
template <class T, bool kFloat, bool kNarrow>
AK_DEVICE void read_half(uint32_t chunk, int half, int columns, float* v) {
  if (!kNarrow || half == 0 || columns > 16)
    return read_half<T, kFloat>(advance_columns<kFloat, kNarrow>(chunk, 16 * half), v);
  AK_UNROLL
  for (int i = 0; i < kValues / 2; i++) v[i] = 0.0f;
}
template <class T, bool kFloat, bool kNarrow>
AK_DEVICE void read_chunk(uint32_t at, int columns, float (&v)[kValues]) {
  read_half<T, kFloat, kNarrow>(at, 0, columns, v);
  read_half<T, kFloat, kNarrow>(at, 1, columns, v + 8);
}
template <class T, bool kFloat, bool kNarrow>
AK_DEVICE void write_chunk(uint32_t at, const float (&v)[kValues]) {
  write_half<T, kFloat>(at, v);
  write_half<T, kFloat>(advance_columns<kFloat, kNarrow>(at, 16), v + 8);
}

// ---- arithmetic.

/// This thread's bias of a chunk: fp32, or before widening a 16-bit pair in every other word.
struct ChunkBias {
  uint32_t words[kValues / 2];
};

/// Identity bias: -0.0, since x + -0.0 is x for every x.
AK_DEVICE ChunkBias identity_bias() {
  ChunkBias bias;
  AK_UNROLL
  for (int i = 0; i < kValues / 2; i++) bias.words[i] = 0x80000000u;
  return bias;
}

/// Address of a lane's bias columns, and the bias's column count: even, 0 without a bias.
struct LaneBias {
  const char* data;
  bool is_float;
  int end, first;

  AK_DEVICE LaneBias(const Args& args, const char* bias, int lane)
      : is_float(args.float_bias), end(bias ? args.n : 0), first(lane % 4 * 2) {
    data = opaque(bias + first * (is_float ? 4 : 2));
  }
  /// Loads the chunk at `column`; `to` keeps its values out of bounds.
  AK_DEVICE void load_chunk(int column, ChunkBias& to) const {
    const auto each = [&](auto load_pair) {
      if (column + kChunk <= end) {
        AK_UNROLL
        for (int b = 0; b < kChunk / 8; b++) load_pair(b);
      } else if (column < end) {
        AK_UNROLL
        for (int b = 0; b < kChunk / 8; b++) {
          if (column + first + 8 * b < end) load_pair(b);
        }
      }
    };
    if (is_float) {
      const auto* const from = reinterpret_cast<const uint32_t*>(data) + column;
      each([&](int b) {
        const auto pair = load_vec<2>(from + 8 * b);
        to.words[2 * b] = pair[0], to.words[2 * b + 1] = pair[1];
      });
    } else {
      const auto* const from = reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint16_t*>(data) + column);
      each([&](int b) { to.words[2 * b] = load(from + 4 * b); });
    }
  }
};

/// Widens the bias in place: a copy would cost register moves even for an fp32 bias.
template <class T>
AK_DEVICE void widen_bias(bool is_float, ChunkBias& bias) {
  if (is_float) return;
  AK_UNROLL
  for (int i = 0; i < kValues / 2; i += 2) {
    float low, high;
    widen_pair<T>(bias.words[i], low, high);
    bias.words[i + 1] = bits_of(high), bias.words[i] = bits_of(low);
  }
}

constexpr int chunks_in(int columns) { return (columns + kChunk - 1) / kChunk; }

/// v = alpha sums + bias of chunk `chunk`, searched from kFirst to kEnd - 1; 0 beyond the tile's last column. `chunk`
/// is uniform.
template <int kFirst, int kEnd, int kSlices, int kHalfBlockN>
AK_DEVICE void select_sums(const float (&acc)[kSlices][kHalfBlockN], int chunk, float alpha, const ChunkBias& bias,
                           float (&v)[kValues]) {
  if constexpr (kEnd - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if (chunk < kMiddle) {
      select_sums<kFirst, kMiddle>(acc, chunk, alpha, bias, v);
    } else {
      select_sums<kMiddle, kEnd>(acc, chunk, alpha, bias, v);
    }
  } else {
    constexpr int kChunksPerSlice = chunks_in(2 * kHalfBlockN), kFrom = kFirst % kChunksPerSlice * kValues;
    const float* sums = acc[kFirst / kChunksPerSlice] + kFrom;
    AK_UNROLL
    for (int i = 0; i < kValues; i++)
      v[i] = kFrom + i < kHalfBlockN ? fma(alpha, sums[i], float_of(bias.words[i / 4 * 2 + i % 2])) : 0.0f;
  }
}

/// Calls f with the activation as a constant, so that each has its own loop over the chunks: with one loop for all, the
/// registers of the most demanding one leave too few for independent chains of the others.
template <class F>
AK_DEVICE void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::none:
      return f(std::integral_constant<Activation, Activation::none>());
    case Activation::relu:
      return f(std::integral_constant<Activation, Activation::relu>());
    case Activation::gelu:
      return f(std::integral_constant<Activation, Activation::gelu>());
    case Activation::gelu_tanh:
      return f(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::silu:
      return f(std::integral_constant<Activation, Activation::silu>());
    case Activation::swiglu:
      return f(std::integral_constant<Activation, Activation::swiglu>());
  }
}

/// Sums the first `rows` of a warp's 16 rows and stores the sums of the first `columns` columns. The order is that of
/// sum_of_rows(): each shuffle pairs the same rows and halves a lane's columns, down to one.
AK_DEVICE void store_column_sums(float* to, int columns, int rows, int lane, const float (&v)[kValues]) {
  float sum[kValues / 2];
  AK_UNROLL
  for (int i = 0; i < kValues / 2; i++) sum[i] = v[i / 2 * 4 + i % 2] + v[i / 2 * 4 + i % 2 + 2];
  if (rows < 16) {
    AK_UNROLL
    for (int i = 0; i < kValues / 2; i++) {
      if (lane / 4 + 8 >= rows) sum[i] = v[i / 2 * 4 + i % 2] + 0.0f;
      if (lane / 4 >= rows) sum[i] = 0.0f;
    }
  }
  AK_UNROLL
  for (int left = kValues / 4; left > 0; left /= 2) {
    const int apart = kValues / left;
    const bool second = lane & apart;
    AK_UNROLL
    for (int i = 0; i < left; i++) {
      const float kept = second ? sum[i + left] : sum[i], given = second ? sum[i] : sum[i + left];
      sum[i] = kept + shuffle_xor(given, apart);
    }
  }
  const int column = (lane / 4 % 2 * 2 + lane / 8 % 2) * 8 + lane % 4 * 2 + lane / 16;
  if (column < columns) store(to + column, sum[0]);
}

/// Runs the epilogue of a consumer's accumulators, box by box. `phases`: phase bits of slot_ready(). kBackward:
/// computes the gradient of the activation.
template <class T, bool kFloat, bool kBackward, Activation kActivation, class Tile>
AK_DEVICE void run_tma_epilogue(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2],
                                const TileBoxes<kFloat, Tile>& boxes, uint32_t slots, Mailbox mailbox, uint32_t& phases,
                                const Args& args) {
  using Boxes = TileBoxes<kFloat, Tile>;
  constexpr bool kNarrow = Boxes::kBoxColumns < Boxes::kColumns;
  constexpr int kChunksPerSlice = chunks_in(Tile::kBlockN), kChunks = Tile::kSlicesM * kChunksPerSlice;
  const Epilogue& e = args.epilogue;
  const int thread = thread_in_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t lane_base = lane_address<kFloat, kNarrow>(slots, warp, lane);
  constexpr bool kGated = kActivation == Activation::swiglu;
  const bool reads_aux = kBackward || args.reads_aux;
  const int end = opaque(args.n);
  const LaneBias lane_bias(args, bias_of_tile<Tile>(args, boxes.batch), lane);
  ChunkBias bias = identity_bias();
  if (!kBackward) lane_bias.load_chunk(boxes.n, bias);
  int slot = 0;
  AK_NO_UNROLL
  for (int step = 0; step < boxes.steps; step++, slot ^= kBackward && kGated ? 0 : 1) {
    mbarrier_wait(mailbox.slot_ready(slot), phases >> slot & 1);
    phases ^= 1 << slot;
    const int row = boxes.row(step) + warp * 16;
    float* sums = nullptr;
    if (kBackward && e.column_sums && row < args.m) {
      const int64_t group = boxes.batch * static_cast<int64_t>((args.m + 15) / 16) + row / 16;
      sums = e.column_sums + group * (kGated ? 2 * end : end);
    }
    int chunk = boxes.slice(step) * kChunksPerSlice + boxes.index_in_slice(step) * (Boxes::kColumns / kChunk);
    AK_NO_UNROLL
    for (int box_column = 0; box_column < Boxes::kColumns; box_column += kChunk, chunk++) {
      const int column = boxes.first_column(step) + box_column;  // in the tile
      const int columns = boxes.columns - column;                // in bounds, from here on
      if (kNarrow && columns <= 0) break;                        // TMA clips wide boxes
      const uint32_t at = advance_columns<kFloat, kNarrow>(lane_base + slot * kSliceBytes, box_column);
      float v[kValues], aux[kValues], up[kValues];
      if (!kBackward) widen_bias<T>(args.float_bias, bias);
      select_sums<0, kChunks>(acc, chunk, e.alpha, bias, v);
      if (!kBackward)  // prefetch the next chunk's bias
        lane_bias.load_chunk(boxes.n + boxes.next_chunk(column), bias);
      if constexpr (kBackward) {
        if constexpr (kGated) {
          AK_UNROLL
          for (int half = 0; half < 2; half++) {  // in halves, to save registers
            read_half<T, kFloat, kNarrow>(at, half, columns, aux);
            read_half<T, kFloat, kNarrow>(at + kSliceBytes, half, columns, up + 8 * half);
            AK_UNROLL
            for (int i = 8 * half; i < 8 * half + 8; i++) {
              const GatedGradient g = swiglu_backward(v[i], aux[i % 8], up[i]);
              v[i] = g.gate;
              up[i] = g.up;
            }
          }
        } else {
          AK_UNROLL
          for (int half = 0; half < 2; half++) {
            float z[kValues / 2];
            read_half<T, kFloat, kNarrow>(at, half, columns, z);
            AK_UNROLL
            for (int i = 0; i < 8; i++) v[8 * half + i] = ak::activate_backward(kActivation, v[8 * half + i], z[i]);
          }
        }
      } else {
        if (kActivation != Activation::none && !kGated) {
          AK_UNROLL
          for (int i = 0; i < kValues; i++) v[i] = ak::activate(kActivation, v[i]);
        }
        if constexpr (Tile::kBlockN % 128 == 0) {
          if constexpr (kGated) {
            ChunkBias value_bias = identity_bias();
            lane_bias.load_chunk(boxes.n + column + end / 2, value_bias);
            widen_bias<T>(args.float_bias, value_bias);
            select_sums<0, kChunks>(acc, chunk + Tile::kBlockN / 2 / kChunk, e.alpha, value_bias, up);
            AK_UNROLL
            for (int i = 0; i < kValues; i++) v[i] = swiglu(v[i], up[i]);
          }
        }
        if (reads_aux) {
          read_chunk<T, kFloat, kNarrow>(at, columns, aux);
          AK_UNROLL
          for (int i = 0; i < kValues; i++) v[i] = fma(e.beta, aux[i], v[i]);
        }
      }
      if (reads_aux) warp_sync();  // the slot has been read
      write_chunk<T, kFloat, kNarrow>(at, v);
      if constexpr (kBackward) {
        if constexpr (kGated) write_chunk<T, kFloat, kNarrow>(at + kSliceBytes, up);
        if (sums == nullptr) continue;
        store_column_sums(sums + boxes.n + column, columns, args.m - row, lane, v);
        if constexpr (kGated) store_column_sums(sums + end + boxes.n + column, columns, args.m - row, lane, up);
      }
    }
    fence_proxy_async();
    warp_sync();
    if (lane == 0) mbarrier_arrive(mailbox.slot_done(slot));
  }
}

}  // namespace gemm
}  // namespace ak
