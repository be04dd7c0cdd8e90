// Tiles of gemm_sm90: their sizes, and what the kernel is told of a problem.
#pragma once
#include <algorithm>
#include <type_traits>

#include "kernels/gemm_sm90.h"

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
  // Registers a thread. 64 K are shared out in equal parts at first (255, 168 or 128 a thread); then the producer gives
  // most of its own to the consumers. With one consumer there is enough for both.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kAccumulators > 160 ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kAccumulators > 160 ? 240 : 232;
  static constexpr GemmTile kShape{kBlockM, kBlockN, kClusterM, kClusterN, kConsumers, kPingpong};
  static constexpr bool kTakesEpilogue = gemm_sm90_takes_epilogue(kShape);
  /// Whether the producer asks for what the epilogue reads; beside three consumers it has no registers for that.
  static constexpr bool kPrefetches = kTakesEpilogue && kConsumers < 3;
  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr bool kBoxes = kBlockN % 64 == 0;  // 16-bit output goes through TMA boxes of 64 columns
  static constexpr int kStageColumns = kBlockN % 128 == 0 ? 128 : 64;  // of 16-bit output, staged at a time
  static constexpr int kRowPitch = kBlockN * 2 + 16;  // without boxes; 16 bytes on, so that rows differ in banks
  static_assert(kConsumers >= 1 && kConsumers <= 3, "one to three consumer warpgroups");
  static_assert(!kPingpong || kConsumers == 2, "two take turns");
  static_assert(kConsumerRows % 64 == 0, "a consumer's rows are a multiple of 64");
  static_assert(kCluster == 1 || kCluster == 2, "clusters are of one block or two");
  static_assert(
      kStages >= 2,
      "a stage is released one step after its use: with a single one, producer and consumer wait for each other");
};

inline int divide_up(int x, int by) { return (x + by - 1) / by; }

/// Bytes through which a consumer's results leave; kFloat: as fp32, else rounded to 16 bits.
template <bool kFloat, class Tile>
constexpr int staging_bytes() {
  if (kFloat) return 64 * 64 * 4;
  if (Tile::kBoxes) return 64 * Tile::kStageColumns * 2;
  constexpr int kRounded = 64 * Tile::kRowPitch, kSums = 64 * Tile::kBlockN * 4;
  return Tile::kBlockN < 64 && kSums > kRounded ? kSums : kRounded;
}
/// Columns of fp32 sums of 64 rows that find room there.
template <bool kFloat, class Tile>
constexpr int staged_columns() {
  constexpr int kFit = staging_bytes<kFloat, Tile>() / (64 * 4);
  return kFit >= 64 ? 64 : kFit >= 32 ? 32 : 16;
}
template <bool kFloat, class Tile>
constexpr int shared_bytes() {
  constexpr int kAlignment = 1024, kBarriers = 16 * Tile::kStages, kFlags = 4 * Tile::kConsumers;
  return kAlignment + Tile::kStages * (Tile::kBytesA + Tile::kBytesB) +
         Tile::kConsumers * staging_bytes<kFloat, Tile>() + kBarriers + kFlags;
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

/// How the sums become C. All but the last two leave the registers in the form they have in C.
enum class Finish {
  kPlain,      ///< as they are
  kScaled,     ///< times alpha
  kBias,       ///< plus a bias per column of the inputs' type
  kFloatBias,  ///< plus one in fp32
  kWords,      ///< times alpha, plus any bias of these, into rows that begin anywhere: the threads store them
  kVectors,    ///< through the whole epilogue, neighbours of 16 bytes of C at a time
  kElements,   ///< the same, one at a time: C and the operands may lie anywhere
};

/// GemmValues with distances in bytes; the narrow ones where they fit, as those of vectors do: a product with them is a
/// single instruction.
struct Operand {
  char* data;
  int64_t row_bytes, column_bytes, batch_bytes;
  int row_narrow, column_narrow, batch_narrow;
  DType type;
};
inline Operand operand(const GemmValues& t) {
  const int64_t size = bytes_of(t.type);
  const int64_t row = t.row_stride * size, column = t.column_stride * size, batch = t.batch_stride * size;
  return {static_cast<char*>(t.data), row,   column, batch, static_cast<int>(row), static_cast<int>(column),
          static_cast<int>(batch),    t.type};
}

/// GemmEpilogue, and C.
struct Epilogue {
  float alpha, beta;
  bool extras;  ///< alpha or z: seldom, so one question for both
  Activation activation;
  Operand c, bias, residual, z, preact;
  float* column_sums;
};

/// The operand of C's size that the epilogue reads, residual or pre-activation: the producer asks it into L2.
struct Beside {
  const char* data;  ///< null where there is none, or where neighbours in a row of it lie apart
  int64_t row_bytes, batch_bytes;
  int64_t value_bytes;  ///< from a gate to its value, which a tile reads as well; or 0
  int element_bytes;
  uint32_t in_row;  ///< lines of 128 bytes that a row of a tile may lie in
  int in_step;      ///< of them a lane of a warp takes with each step of k
};

struct Args {
  Epilogue epilogue;
  Beside beside;
  Finish finish;
  GemmOutput output;
  int m, n, k;       // of A and B
  int columns;       // of C that come out of the accumulators: n, or n / 2 with swiglu
  int tile_columns;  // as in the schedule
  int second_half;   // columns of B from the first half of a tile's columns to the second: kBlockN / 2, or n / 2
  Schedule schedule;
};

/// What a block works on.
struct Work {
  int m, n;  // first row and column of its tile in C
  int batch;
  int first_step, last_step;  // of k
  int split;
  int tile;  // number of the tile in scratch
};

/// Values of C that move together where the operands allow it: 16 bytes of them.
template <bool kFloat>
inline constexpr int kNeighbours = kFloat ? 4 : 8;

/// Whether accesses of `bytes` to the rows of `t` are aligned, wherever a row or a matrix of it begins, and a row's
/// bytes are an int.
inline bool in_vectors(const GemmValues& t, int bytes, int batch) {
  const auto aligned = [&](int64_t stride) { return stride * bytes_of(t.type) % bytes == 0; };
  const auto narrow = [&](int64_t stride) { return stride >= 0 && stride * bytes_of(t.type) <= INT32_MAX; };
  return t.column_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && aligned(t.row_stride) &&
         narrow(t.row_stride) && (batch == 1 || (aligned(t.batch_stride) && narrow(t.batch_stride)));
}

/// `half`: the type of A and B; `as_float`: TMA writes fp32.
inline Finish finish_of(const GemmProblem& q, DType half, bool as_float) {
  const int neighbours = as_float ? kNeighbours<true> : kNeighbours<false>;
  const GemmEpilogue& e = q.epilogue;
  const DType type = as_float ? DType::kFloat32 : half;
  if (gemm_sm90_in_registers(q, half) && gemm_sm90_has_rows(q, type)) {
    if (!gemm_sm90_tma_writes(q, type)) return Finish::kWords;
    if (e.bias.data) return e.bias.type == half ? Finish::kBias : Finish::kFloatBias;
    return e.alpha == 1.0f ? Finish::kPlain : Finish::kScaled;
  }
  bool vectors = (is_halved(q) ? q.n / 2 : q.n) % neighbours == 0 && e.bias.row_stride == 0;
  for (const GemmValues* t : {&q.c, &e.residual, &e.z, &e.preact, &e.bias}) {
    if (!t->data) continue;
    const int bytes = neighbours * bytes_of(t->type), access = std::min(bytes, 16);
    const bool fits = t->type == half || (t->type == DType::kFloat32 && (bytes <= 16 || t == &e.bias));
    vectors = vectors && fits && in_vectors(*t, access, q.batch);
  }
  // Backward there is usually nothing but `preact`, and no registers for more.
  vectors = vectors && !(e.preact.data && (e.bias.data || e.residual.data || e.z.data));
  return vectors ? Finish::kVectors : Finish::kElements;
}

template <class T, bool kFloat, class Tile>
Args arguments(const GemmProblem& q, GemmOutput output) {
  constexpr DType kHalf = std::is_same_v<T, bf16> ? DType::kBFloat16 : DType::kFloat16;
  const bool halved = is_halved(q);
  GemmProblem p = q;
  if (output == GemmOutput::kAccumulate && finish_of(q, kHalf, kFloat) >= Finish::kVectors) {
    p.epilogue.residual = q.c;  // threads write C, so they read it
    p.epilogue.beta = 1.0f;
  }
  const GemmEpilogue& e = p.epilogue;
  Args args{};
  args.epilogue = {e.alpha,           e.beta,          e.alpha != 1.0f || e.z.data, e.activation,
                   operand(q.c),      operand(e.bias), operand(e.residual),         operand(e.z),
                   operand(e.preact), e.column_sums};
  args.finish = finish_of(p, kHalf, kFloat);
  args.output = output;
  args.m = q.m, args.n = q.n, args.k = q.k;
  args.columns = halved ? q.n / 2 : q.n;
  args.tile_columns = halved ? Tile::kBlockN / 2 : Tile::kBlockN;
  args.second_half = halved ? q.n / 2 : Tile::kBlockN / 2;
  return args;
}

/// For tiles of `rows` rows, whose lines are asked for in the steps of a part of k.
inline Beside beside_c(const Args& args, int rows) {
  const Epilogue& e = args.epilogue;
  const Operand& t = e.preact.data ? e.preact : e.residual;
  const int element = bytes_of(t.type), width = args.tile_columns * element;
  if (!t.data || t.column_bytes != element) return {};
  const int64_t value = e.preact.data && e.activation == Activation::swiglu ? int64_t{args.n} * element : 0;
  const auto in_lines = [](int64_t bytes) { return bytes % 128 == 0; };
  const bool aligned = reinterpret_cast<uintptr_t>(t.data) % 128 == 0 && in_lines(t.row_bytes) &&
                       in_lines(t.batch_bytes) && in_lines(value) && in_lines(width);
  const int in_row = divide_up(width, 128) + (aligned ? 0 : 1);
  return {t.data,
          t.row_bytes,
          t.batch_bytes,
          value,
          element,
          static_cast<uint32_t>(in_row),
          divide_up(rows / 32 * in_row, args.schedule.k_steps_per_split)};
}

}  // namespace gemm
}  // namespace ak
