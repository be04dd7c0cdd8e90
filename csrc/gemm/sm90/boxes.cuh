// The epilogue of gemm_sm90 where TMA moves all that it reads and writes: activations, their derivatives, residual,
// column sums.
//
// Work: one pass over a consumer's sums in fp32; of a tile beside C, residual or pre-activation, one read. Plan: what
// is read comes by TMA into boxes of 64 rows of 128 bytes in the consumer's staging buffer, or where these do not fill
// the tile's width into up to four of 32 bytes, the first of them while the main loop runs, and is asked into L2 by
// then altogether. There it has the form in which stmatrix leaves results, so ldmatrix gives each thread what belongs
// to its sums, in the registers' own order; the results take its place and leave by TMA. All the moving is the work of
// the consumer's assistant (gemm_sm90_producer.cuh), which gives it two slots in turn: one is finished while the other
// is stored and filled anew. A pair, of swiglu's backward, takes both: there every load but the first is waited for.
// The sums are worked on 32 columns at a time, by one copy of the code, which the compiler cannot do with registers
// that a loop picks: so a branch that all threads take together moves them to where the code expects them, and the
// product with alpha and the sum with the bias, which happen anyway, are the moves. Traps: a slot is free for the next
// load only when its store has read it, which none but the thread that issued the store can wait for. Rows below C come
// as zeros times whatever B holds, perhaps NaN, so column sums pass over them.
#pragma once
#include "device/block.cuh"
#include "device/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "device/warp.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/tile.cuh"

namespace ak {
namespace gemm {

constexpr int kChunk = 32;  // columns worked on together

/// The boxes that a consumer finishes of a tile: slice by slice, each from left to right, in steps of 128 bytes of a
/// row, which are one box or several narrow ones. With `pairs` the epilogue has two of all in a step, of gates and of
/// values, which lie half a row of C further on: they are the matrices of a map.
template <bool kFloat, class Tile>
struct Boxes {
  static constexpr int kColumns = kFloat ? 32 : 64, kBoxColumns = kFloat ? 32 : Tile::kBoxColumns;
  static constexpr int kBoxBytes = kSliceBytes / (kColumns / kBoxColumns);
  int m, n, batch;  ///< first row and column in C
  int beside;       ///< matrix of what is read
  int columns;      ///< that C has of the tile
  int in_slice, steps;
  bool pairs;

  /// From what it takes: no register of the main loop is kept for what is soon computed again.
  AK_DEVICE Boxes(const Args& args, const Work& work, int consumer)
      : m(opaque(work.m) + (Tile::kPingpong ? 0 : opaque(consumer) * Tile::kConsumerRows)),
        n(opaque(work.n)),
        batch(opaque(work.batch)),
        beside(batch * args.batches_beside) {
    static_assert(Tile::kSlicesM <= 2, "a consumer has one slice or two");
    columns = args.columns - n < args.tile_columns ? args.columns - n : args.tile_columns;
    const int slices = m >= args.m ? 0 : Tile::kSlicesM == 1 || m + 64 >= args.m ? 1 : 2;
    in_slice = columns <= 0 ? 0 : (columns + kColumns - 1) / kColumns;
    steps = slices * in_slice;
    pairs = !kFloat && args.epilogue.activation == Activation::swiglu && args.epilogue.preact.data;
  }
  AK_DEVICE int slice(int step) const { return Tile::kSlicesM > 1 && step >= in_slice; }
  AK_DEVICE int number_in_slice(int step) const { return step - slice(step) * in_slice; }
  AK_DEVICE int first_column(int step) const { return number_in_slice(step) * kColumns; }  ///< of the tile
  AK_DEVICE int row(int step) const { return m + slice(step) * 64; }
  /// The first column of the chunk behind the one at `column`; at the tile's end anything.
  AK_DEVICE int next_chunk(int column) const {
    return Tile::kSlicesM == 1 || column + kChunk < columns ? column + kChunk : 0;
  }
  AK_DEVICE int slot(int step) const { return pairs ? 0 : step % 2; }
  AK_DEVICE int under_way() const { return pairs ? 1 : 2; }  ///< steps that find room in the slots

  /// Boxes of a step: narrow ones end with the tile, whose neighbour has the next.
  AK_DEVICE int boxes(int step) const {
    if (kBoxColumns == kColumns) return 1;
    const int left = columns - first_column(step);
    return left < kColumns ? (left + kBoxColumns - 1) / kBoxColumns : kColumns / kBoxColumns;
  }
  /// f(its first column in C, its place in the slot) of each box of a step.
  template <class F>
  AK_DEVICE void each_box(int step, F f) const {
    AK_NO_UNROLL
    for (int i = 0; i < boxes(step); i++) f(n + first_column(step) + i * kBoxColumns, i * kBoxBytes);
  }

  /// Asks for all that is read to be in L2 soon.
  AK_DEVICE void prefetch(const TensorMap* map) const {
    AK_NO_UNROLL
    for (int step = 0; step < steps; step++) {
      each_box(step, [&](int x, uint32_t) {
        tma_prefetch(map, x, row(step), beside);
        if (pairs) tma_prefetch(map, x, row(step), 1);
      });
    }
  }
  /// Loads what a step reads into its slot, which is free; it counts on `barrier`.
  AK_DEVICE void load(const TensorMap* map, uint32_t slots, uint32_t barrier, int step) const {
    const uint32_t slot_at = slots + slot(step) * kSliceBytes;
    mbarrier_arrive_expect_tx(barrier, boxes(step) * (pairs ? 2 * kBoxBytes : kBoxBytes));
    each_box(step, [&](int x, uint32_t place) {
      tma_load(slot_at + place, map, barrier, x, row(step), beside);
      if (pairs) tma_load(slot_at + kSliceBytes + place, map, barrier, x, row(step), 1);
    });
  }
  /// Stores what a step leaves in its slot.
  AK_DEVICE void store(const TensorMap* map, uint32_t slots, int step) const {
    const uint32_t slot_at = slots + slot(step) * kSliceBytes;
    each_box(step, [&](int x, uint32_t place) {
      tma_store(map, slot_at + place, x, row(step), batch);
      if (pairs) tma_store(map, slot_at + kSliceBytes + place, x, row(step), 1);
    });
    bulk_commit();
  }
};

// ---- the assistant's side: it gives the consumer one slot after the other, with what it reads, and stores what is
// there when the slot is finished.

/// Gives the consumer the slot of a step, when all stores have left it.
template <bool kFloat, class Tile>
AK_DEVICE void give_box(const Boxes<kFloat, Tile>& boxes, const TensorMap* beside, uint32_t slots, Desk desk,
                        bool reads, int step) {
  const uint32_t barrier = desk.ready(boxes.slot(step));
  bulk_wait_read<0>();
  if (reads) {
    boxes.load(beside, slots, barrier, step);
  } else {
    mbarrier_arrive(barrier);
  }
}

/// As many as there are slots.
template <bool kFloat, class Tile>
AK_DEVICE void give_first_boxes(const Boxes<kFloat, Tile>& boxes, const TensorMap* beside, uint32_t slots, Desk desk,
                                bool reads) {
  AK_NO_UNROLL
  for (int step = 0; step < boxes.under_way() && step < boxes.steps; step++)
    give_box(boxes, beside, slots, desk, reads, step);
}

/// All boxes, the first of which are given. `phases`: of the barriers where the assistant is told of finished slots, a
/// bit each.
template <bool kFloat, class Tile>
AK_DEVICE void move_boxes(const Boxes<kFloat, Tile>& boxes, const TensorMap* map_c, const TensorMap* beside,
                          uint32_t slots, Desk desk, bool reads, uint32_t& phases) {
  AK_NO_UNROLL
  for (int step = 0; step < boxes.steps; step++) {
    const int slot = boxes.slot(step), next = step + boxes.under_way();
    mbarrier_wait(desk.finished(slot), phases >> slot & 1);
    phases ^= 1 << slot;
    boxes.store(map_c, slots, step);
    if (next < boxes.steps) give_box(boxes, beside, slots, desk, reads, next);
  }
}

// ---- a thread's values of 32 columns of a box, twice 16 as they are stored.

constexpr int kValues = 64 * kChunk / kWarpgroupThreads;

/// 16 of the columns.
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

/// Half of a chunk, with `columns` of the tile and of C from its first one on: beside them there may be no narrow box,
/// and nothing has been loaded.
template <class T, bool kFloat, bool kNarrow>
AK_DEVICE void read_half(uint32_t chunk, int half, int columns, float* v) {
  if (!kNarrow || half == 0 || columns > 16) return read_half<T, kFloat>(further<kFloat, kNarrow>(chunk, 16 * half), v);
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
  write_half<T, kFloat>(further<kFloat, kNarrow>(at, 16), v + 8);
}

// ---- what happens to the sums.

/// This thread's columns of a bias in a chunk: in fp32, or as they lie in memory, in the inputs' type a pair in every
/// other word.
struct ChunkBias {
  uint32_t words[kValues / 2];
};

/// What no bias is, in fp32: -0 changes no sum.
AK_DEVICE ChunkBias no_bias() {
  ChunkBias bias;
  AK_UNROLL
  for (int i = 0; i < kValues / 2; i++) bias.words[i] = 0x80000000u;
  return bias;
}

/// Where a lane's columns of a bias begin, and how many columns the bias has, an even number; 0: there is none.
struct BiasOfLane {
  const char* data;
  bool is_float;
  int end, first;

  AK_DEVICE BiasOfLane(const Args& args, int lane)
      : is_float(args.float_bias), end(args.epilogue.bias.data ? args.n : 0), first(lane % 4 * 2) {
    data = opaque(args.epilogue.bias.data + first * (is_float ? 4 : 2));
  }
  /// Those of the chunk at `column`; what lies behind the last stays as it is.
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

/// All of it in fp32, in place: a copy would be moved from register to register also where nothing is to be done.
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

constexpr int chunks_of(int columns) { return (columns + kChunk - 1) / kChunk; }

/// v = alpha sums + bias, for chunk number `chunk` of those from kFirst to kEnd - 1; 0 beside the tile, where the last
/// chunk of a slice may end. All threads pass the same.
template <int kFirst, int kEnd, int kSlices, int kHalfBlockN>
AK_DEVICE void take_sums(const float (&acc)[kSlices][kHalfBlockN], int chunk, float alpha, const ChunkBias& bias,
                         float (&v)[kValues]) {
  if constexpr (kEnd - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if (chunk < kMiddle) {
      take_sums<kFirst, kMiddle>(acc, chunk, alpha, bias, v);
    } else {
      take_sums<kMiddle, kEnd>(acc, chunk, alpha, bias, v);
    }
  } else {
    constexpr int kInSlice = chunks_of(2 * kHalfBlockN), kFrom = kFirst % kInSlice * kValues;
    const float* sums = acc[kFirst / kInSlice] + kFrom;
    AK_UNROLL
    for (int i = 0; i < kValues; i++)
      v[i] = kFrom + i < kHalfBlockN ? fma(alpha, sums[i], float_of(bias.words[i / 4 * 2 + i % 2])) : 0.0f;
  }
}

AK_DEVICE void activate(Activation activation, float (&v)[kValues]) {
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kValues; i++) v[i] = f(v[i]);
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

AK_DEVICE void activate_backward(Activation activation, float (&v)[kValues], const float (&z)[kValues]) {
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kValues; i++) v[i] = f(v[i], z[i]);
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

/// Adds a warp's 16 rows up, the first `rows` of which there are, and stores the sums of the first `columns` columns.
/// The order is that of sum_of_rows(): the exchanges between lanes pair the same rows. Each leaves a lane half as many
/// columns, in the end one.
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

/// Finishes a consumer's accumulators, box by box. `phases`: of the barriers where it is given slots, a bit each.
/// Forward, or the backward of an activation: for the registers that is known at compile time.
template <class T, bool kFloat, bool kBackward, class Tile>
AK_DEVICE void finish_boxes(const float (&acc)[Tile::kSlicesM][Tile::kBlockN / 2], const Boxes<kFloat, Tile>& boxes,
                            uint32_t slots, Desk desk, uint32_t& phases, const Args& args) {
  using Walk = Boxes<kFloat, Tile>;
  constexpr bool kNarrow = Walk::kBoxColumns < Walk::kColumns;
  constexpr int kInSlice = chunks_of(Tile::kBlockN), kChunks = Tile::kSlicesM * kInSlice;
  const Epilogue& e = args.epilogue;
  const int thread = thread_of_warpgroup(), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const uint32_t mine = lane_of_box<kFloat, kNarrow>(slots, warp, lane);
  const bool gated = e.activation == Activation::swiglu, reads = kBackward || args.reads;
  const int end = opaque(args.n);
  const BiasOfLane bias_of(args, lane);
  ChunkBias bias = no_bias();
  if (!kBackward) bias_of.load_chunk(boxes.n, bias);
  int slot = 0;
  AK_NO_UNROLL
  for (int step = 0; step < boxes.steps; step++, slot ^= boxes.pairs ? 0 : 1) {
    mbarrier_wait(desk.ready(slot), phases >> slot & 1);
    phases ^= 1 << slot;
    const int row = boxes.row(step) + warp * 16;
    float* sums = nullptr;
    if (kBackward && e.column_sums && row < args.m) {
      const int64_t group = boxes.batch * static_cast<int64_t>((args.m + 15) / 16) + row / 16;
      sums = e.column_sums + group * (gated ? 2 * end : end);
    }
    int chunk = boxes.slice(step) * kInSlice + boxes.number_in_slice(step) * (Walk::kColumns / kChunk);
    AK_NO_UNROLL
    for (int in_box = 0; in_box < Walk::kColumns; in_box += kChunk, chunk++) {
      const int column = boxes.first_column(step) + in_box;  // of the tile
      const int columns = boxes.columns - column;            // there are, from here on
      if (kNarrow && columns <= 0) break;                    // a wide box is stored whole
      const uint32_t at = further<kFloat, kNarrow>(mine + slot * kSliceBytes, in_box);
      float v[kValues], side[kValues], up[kValues];
      if (!kBackward) widen_bias<T>(args.float_bias, bias);
      take_sums<0, kChunks>(acc, chunk, e.alpha, bias, v);
      if (!kBackward)  // the next chunk's, into the registers that are free now
        bias_of.load_chunk(boxes.n + boxes.next_chunk(column), bias);
      if constexpr (kBackward) {
        if (gated) {
          AK_UNROLL
          for (int half = 0; half < 2; half++) {  // for the registers
            read_half<T, kFloat, kNarrow>(at, half, columns, side);
            read_half<T, kFloat, kNarrow>(at + kSliceBytes, half, columns, up + 8 * half);
            AK_UNROLL
            for (int i = 8 * half; i < 8 * half + 8; i++) {
              const GatedGradient g = swiglu_backward(v[i], side[i % 8], up[i]);
              v[i] = g.gate;
              up[i] = g.up;
            }
          }
        } else {
          read_chunk<T, kFloat, kNarrow>(at, columns, side);
          activate_backward(e.activation, v, side);
        }
      } else {
        if (e.activation != Activation::none && !gated) activate(e.activation, v);
        if constexpr (Tile::kBlockN % 128 == 0) {
          if (gated) {
            ChunkBias value_bias = no_bias();
            bias_of.load_chunk(boxes.n + column + end / 2, value_bias);
            widen_bias<T>(args.float_bias, value_bias);
            take_sums<0, kChunks>(acc, chunk + Tile::kBlockN / 2 / kChunk, e.alpha, value_bias, up);
            AK_UNROLL
            for (int i = 0; i < kValues; i++) v[i] = swiglu(v[i], up[i]);
          }
        }
        if (reads) {
          read_chunk<T, kFloat, kNarrow>(at, columns, side);
          AK_UNROLL
          for (int i = 0; i < kValues; i++) v[i] = fma(e.beta, side[i], v[i]);
        }
      }
      if (reads) warp_sync();  // what was here has been read
      write_chunk<T, kFloat, kNarrow>(at, v);
      if constexpr (kBackward) {
        if (gated) write_chunk<T, kFloat, kNarrow>(at + kSliceBytes, up);
        if (sums == nullptr) continue;
        store_column_sums(sums + boxes.n + column, columns, args.m - row, lane, v);
        if (gated) store_column_sums(sums + end + boxes.n + column, columns, args.m - row, lane, up);
      }
    }
    fence_proxy_async();
    warp_sync();
    if (lane == 0) mbarrier_arrive(desk.finished(slot));
  }
}

}  // namespace gemm
}  // namespace ak
