// Tiles of gemm_sm90: their sizes, and what the kernel is told of a problem.
#pragma once
#include <type_traits>

#include "device/platform.cuh"
#include "gemm/sm90/gemm.h"

namespace ak {
namespace gemm {

constexpr int kBlockK = 64;               // 128 bytes: one row of the swizzle
constexpr int kSliceBytes = 64 * 64 * 2;  // 64 rows (or columns) of one stage
constexpr int kWarpgroupThreads = 128;
constexpr int kSharedLimit = 232448;  // bytes a block may have

/// A tile of C and how it is worked on. Cooperative: the consumer warpgroups share its rows evenly. Pingpong: two
/// consumers take tiles in turn, each all rows of its own. The blocks of a cluster work on neighbouring tiles: below
/// each other with the same columns of B, or, with kShareA, side by side with the same rows of A.
template <int kBlockM_, int kBlockN_, int kStages_, int kCluster_, int kConsumers_, bool kPingpong_ = false,
          bool kShareA = false>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_,
                       kConsumers = kConsumers_;
  static constexpr bool kPingpong = kPingpong_;
  static constexpr int kClusterM = kShareA ? 1 : kCluster, kClusterN = kShareA ? kCluster : 1;
  static constexpr int kThreads = kWarpgroupThreads * (1 + kConsumers);
  static constexpr int kGroups = kPingpong ? 1 : kConsumers;  // warpgroups that share a tile
  static constexpr int kConsumerRows = kBlockM / kGroups;
  static constexpr int kSlicesM = kConsumerRows / 64;           // wgmma is 64 rows high
  static constexpr int kAccumulators = kSlicesM * kBlockN / 2;  // of a consumer's thread
  // Registers a thread. 64 K are shared out in equal parts at first (255, 168 or 128 a thread); then the warpgroup that
  // does not multiply gives most of its own to the consumers. With one consumer there is enough for both.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr GemmTile kShape{kBlockM, kBlockN, kClusterM, kClusterN, kConsumers, kPingpong};
  static constexpr bool kTakesEpilogue = gemm_sm90_takes_epilogue(kShape);
  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  // TMA moves 16-bit values in boxes of 64 columns, 128 bytes, into which not all widths divide; those take boxes of
  // 16, and what needs no epilogue they store row by row.
  static constexpr bool kFullBoxes = kBlockN % 64 == 0;
  static constexpr int kBoxColumns = kFullBoxes ? 64 : 16;
  static constexpr int kStageColumns = gemm_sm90_stage_columns(kBlockN);
  static constexpr int kRowPitch = kBlockN * 2 + 16;  // of rows: 16 bytes on, so that they differ in banks
  static_assert(kConsumers >= 1 && kConsumers <= 3, "one to three consumer warpgroups");
  static_assert(kConsumers == 1 ||
                    kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers),
                "the consumers would wait for registers that nobody has");
  static_assert(!kPingpong || kConsumers == 2, "two take turns");
  static_assert(kConsumerRows % 64 == 0, "a consumer's rows are a multiple of 64");
  static_assert(kBlockN % 16 == 0, "columns divide into boxes");
  static_assert(kFullBoxes || kTakesEpilogue, "without an epilogue the staging buffer has no room for rows");
  static_assert(kCluster == 1 || kCluster == 2, "clusters are of one block or two");
  static_assert(
      kStages >= 2,
      "a stage is released one step after its use: with a single one, producer and consumer wait for each other");
};

inline int divide_up(int x, int by) { return (x + by - 1) / by; }

/// Bytes through which a consumer's results leave; kFloat: as fp32, else rounded to 16 bits.
template <bool kFloat, class Tile>
constexpr int staging_bytes() {
  constexpr int kTwoBoxes = 2 * kSliceBytes;  // that take turns in the epilogue
  constexpr int kRows = 64 * Tile::kRowPitch;
  if (!kFloat && !Tile::kTakesEpilogue) return 64 * Tile::kStageColumns * 2;
  return Tile::kFullBoxes || kRows < kTwoBoxes ? kTwoBoxes : kRows;
}
/// Columns of fp32 sums of 64 rows that find room there.
template <bool kFloat, class Tile>
constexpr int staged_columns() {
  constexpr int kFit = staging_bytes<kFloat, Tile>() / (64 * 4), kWanted = Tile::kBlockN < kFit ? Tile::kBlockN : kFit;
  return kWanted >= 64 ? 64 : kWanted >= 32 ? 32 : 16;
}

/// Where a consumer meets its assistant, in shared memory: barriers, by who arrives there and what is then true, and
/// what one writes for the other.
struct Desk {
  uint32_t at;
  static constexpr int kBytes = 96;
  AK_DEVICE uint32_t described() const { return at; }   ///< assistant: the consumer's next tile stands in work()
  AK_DEVICE uint32_t taken() const { return at + 8; }   ///< the consumer's warps: they have read it
  AK_DEVICE uint32_t asked() const { return at + 16; }  ///< consumer: its boxes may come, if it is last()
  AK_DEVICE uint32_t ready(int slot) const { return at + 24 + slot * 8; }     ///< assistant or TMA: is the consumer's
  AK_DEVICE uint32_t finished(int slot) const { return at + 40 + slot * 8; }  ///< the consumer's warps
  AK_DEVICE uint32_t last() const { return at + 56; }  ///< of a split k, whether the consumer's part was the last
  AK_DEVICE uint32_t work() const { return at + 64; }
};

/// Shared memory, from where the swizzle pattern starts: the stages of A, those of B, the consumers' staging buffers,
/// two barriers a stage, the desks.
template <bool kFloat, class Tile>
constexpr int bytes_before_desks() {
  return Tile::kStages * (Tile::kBytesA + Tile::kBytesB + 16) + Tile::kConsumers * staging_bytes<kFloat, Tile>();
}
template <bool kFloat, class Tile>
constexpr int shared_bytes() {
  static_assert(bytes_before_desks<kFloat, Tile>() % 16 == 0, "a desk holds vectors of 16 bytes");
  constexpr int kAlignment = 1024;
  return kAlignment + bytes_before_desks<kFloat, Tile>() + Tile::kConsumers * Desk::kBytes;
}

/// How the tiles of C are cut and handed out.
struct Schedule {
  int tile_columns;        // of C a tile makes: kBlockN, or half of that with swiglu
  int lines, line_length;  // clusters' tiles: a line is a row of them, or a column if by_columns
  bool by_columns;
  int raster_lines;                // lines that are walked together, so that their slices of A and B stay in L2
  int work_count;                  // of all clusters: tiles, times batch, times splits
  int k_steps, k_steps_per_split;  // of k
  int splits;
  int batch_a, batch_b;  // 0 if all products of the batch share one matrix
  float* partials;
  uint32_t* counters;
};

/// What leaves the registers in the form that it has in memory: the sums, on their way into C or, before an
/// activation, into z.
enum class Store {
  kNothing,
  kPlain,      ///< as they are
  kScaled,     ///< times alpha
  kBias,       ///< plus a bias per column of the inputs' type
  kFloatBias,  ///< plus one in fp32
  kWords,      ///< times alpha, plus any bias of these, into rows that begin anywhere: the threads store them
};
/// What follows: the epilogue into C.
enum class Finish {
  kNothing,
  kBoxes,     ///< TMA moves C and what is read beside it
  kElements,  ///< C and the operands may lie anywhere
};
struct Way {
  Store store;
  Finish finish;
};

/// GemmValues with distances in bytes.
struct Operand {
  char* data;
  int64_t row_bytes, column_bytes, batch_bytes;
  DType type;
};
inline Operand operand(const GemmValues& t) {
  const int64_t size = bytes_of(t.type);
  return {static_cast<char*>(t.data), t.row_stride * size, t.column_stride * size, t.batch_stride * size, t.type};
}

/// GemmEpilogue, and C.
struct Epilogue {
  float alpha, beta;
  Activation activation;
  Operand c, bias, residual, z, preact;
  float* column_sums;
};

struct Args {
  Epilogue epilogue;
  Way way;
  bool float_bias;
  bool reads;          // the boxes' epilogue beside the sums
  bool asks, z_first;  // before it gets boxes: it may not need them; or, also, it has z to store from there
  bool detour;         // the sums do not leave at once: there are parts of k to add up, or it asks
  int batches_beside;  // 0 if all products of the batch share what is read
  GemmOutput output;
  int m, n, k;         // of A and B
  int columns;         // of C that come out of the accumulators: n, or n / 2 with swiglu
  int tile_columns;    // as in the schedule
  int second_half;     // columns of B from the first half of a tile's columns to the second: kBlockN / 2, or n / 2
  int values_further;  // what is between the two: 0, or with swiglu that of B's columns
  Schedule schedule;
};

/// What a block works on.
struct Work {
  int m, n;  // first row and column of its tile in C
  int batch;
  int first_step, steps;  // of k
  int split;
  int tile;  // number of the tile in scratch
};

/// How the sums leave for what TMA writes.
inline Store store_of(const GemmEpilogue& e, DType half) {
  if (e.bias.data) return e.bias.type == half ? Store::kBias : Store::kFloatBias;
  return e.alpha == 1.0f ? Store::kPlain : Store::kScaled;
}

/// `half`: the type of A and B; `as_float`: TMA writes fp32.
inline Way way_of(const GemmProblem& q, DType half, bool as_float) {
  const GemmEpilogue& e = q.epilogue;
  const DType type = as_float ? DType::kFloat32 : half;
  if (gemm_sm90_in_registers(q, half) && gemm_sm90_has_rows(q, type))
    return {gemm_sm90_tma_writes(q, type) ? store_of(e, half) : Store::kWords, Finish::kNothing};
  if (!gemm_sm90_in_boxes(q, half, type)) return {Store::kNothing, Finish::kElements};
  return {e.z.data ? store_of(e, half) : Store::kNothing, Finish::kBoxes};
}

template <class T, bool kFloat, class Tile>
Args arguments(const GemmProblem& q, GemmOutput output, int splits) {
  constexpr DType kHalf = std::is_same_v<T, bf16> ? DType::kBFloat16 : DType::kFloat16;
  const bool halved = is_halved(q);
  GemmProblem p = q;
  if (output == GemmOutput::kAccumulate && way_of(q, kHalf, kFloat).finish != Finish::kNothing) {
    p.epilogue.residual = q.c;  // TMA adds only what is stored as it is
    p.epilogue.beta = 1.0f;
  }
  const GemmEpilogue& e = p.epilogue;
  Args args{};
  args.epilogue = {
      e.alpha,           e.beta,       e.activation, operand(q.c), operand(e.bias), operand(e.residual), operand(e.z),
      operand(e.preact), e.column_sums};
  args.way = way_of(p, kHalf, kFloat);
  args.float_bias = !e.bias.data || e.bias.type == DType::kFloat32;
  args.reads = args.way.finish == Finish::kBoxes && (e.preact.data || e.residual.data);
  args.z_first = args.way.finish == Finish::kBoxes && e.z.data;
  args.asks = args.z_first || (args.way.finish == Finish::kBoxes && splits > 1);
  args.detour = splits > 1 || args.asks;
  args.batches_beside = (e.preact.data ? e.preact : e.residual).batch_stride != 0;
  args.output = output;
  args.m = q.m, args.n = q.n, args.k = q.k;
  args.columns = columns_of_sums(q);
  args.tile_columns = halved ? Tile::kBlockN / 2 : Tile::kBlockN;
  args.second_half = halved ? q.n / 2 : Tile::kBlockN / 2;
  args.values_further = args.second_half - Tile::kBlockN / 2;
  return args;
}

}  // namespace gemm
}  // namespace ak
