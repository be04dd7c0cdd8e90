// Tiles of gemm_sm90, their shared memory layout, and the kernel's arguments.
#pragma once
#include <type_traits>

#include "device/platform.cuh"
#include "device/tensor_map.cuh"
#include "gemm/sm90/gemm.h"

namespace ak {
namespace gemm {

constexpr int kBlockK = 64;               // 128 bytes: one row of the swizzle pattern
constexpr int kSliceBytes = 64 * 64 * 2;  // 64 rows (or columns) of one stage
/// Bytes of a box of an operand that is not k-major, and the swizzle pattern whose rows are the box's.
constexpr int box_bytes(int box_width) { return box_width * kBlockK * 2; }
constexpr Swizzle swizzle_of(int box_width) {
  return box_width == 64 ? Swizzle::k128 : box_width == 32 ? Swizzle::k64 : Swizzle::k32;
}
constexpr int kWarpgroupThreads = 128;
constexpr int kSharedLimit = 232448;  // bytes per block

/// Parts of a grouped product (GroupedProblem).
enum class Grouping {
  kNone,
  kRows,  ///< groups of rows of A and C
  kSums,  ///< groups of terms
};

/// A tile of C and its schedule. Cooperative: the consumer warpgroups share its rows evenly. Pingpong: two consumers
/// alternate tiles. The blocks of a cluster work on adjacent tiles: one below the other, sharing B, or with kShareA
/// side by side, sharing A.
template <int kBlockM_, int kBlockN_, int kStages_, int kCluster_, int kConsumers_, bool kPingpong_ = false,
          bool kShareA = false, bool kTriangular_ = false, Grouping kGrouping_ = Grouping::kNone>
struct Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_,
                       kConsumers = kConsumers_;
  static constexpr bool kPingpong = kPingpong_;
  static constexpr bool kTriangular = kTriangular_;  // of a symmetric C only tiles of the lower triangle are computed
  static constexpr bool kChained = false;
  static constexpr Grouping kGrouping = kGrouping_;
  static constexpr bool kRowGroups = kGrouping == Grouping::kRows, kTermGroups = kGrouping == Grouping::kSums;
  /// Work::steps past the last tile. A tile of a grouped product may have no k steps.
  static constexpr int kEndMark = kGrouping == Grouping::kNone ? 0 : -1;
  static constexpr int kClusterM = kShareA ? 1 : kCluster, kClusterN = kShareA ? kCluster : 1;
  static constexpr int kThreads = kWarpgroupThreads * (1 + kConsumers);
  static constexpr int kGroups = kPingpong ? 1 : kConsumers;  // consumers that share a tile
  static constexpr int kConsumerRows = kBlockM / kGroups;
  static constexpr int kSlicesM = kConsumerRows / 64;           // a wgmma has 64 rows
  static constexpr int kAccumulators = kSlicesM * kBlockN / 2;  // per thread of a consumer
  // Registers per thread. All warpgroups start with an equal share of 64 K (255, 168 or 128 per thread); the producer
  // warpgroup then gives most of its share to the consumers. A single consumer needs no more than its share. 128
  // accumulators need all that there are: only then can an epilogue work on eight independent values at a time.
  static constexpr bool kManyRegisters = kAccumulators >= 128 && kGrouping == Grouping::kNone;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kManyRegisters ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kManyRegisters ? 240 : 232;
  static constexpr GemmTile kShape{kBlockM, kBlockN, kClusterM, kClusterN, kConsumers, kPingpong};
  static constexpr bool kTakesEpilogue = !kTriangular && gemm_sm90_takes_epilogue(kShape);
  /// True if A may be several matrices.
  static constexpr bool kTakesSegments = !kTriangular && kGrouping == Grouping::kNone;
  /// True if an epilogue may be that of epilogue_tma.cuh: sums over groups have none.
  static constexpr bool kTakesBoxes = kTakesEpilogue && !kTermGroups;
  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  // TMA boxes have 64 columns of 16 bits, 128 bytes. Tiles whose width is no multiple of 64 take boxes of 16 columns in
  // the TMA epilogue, and their direct stores go row by row.
  static constexpr bool kFullBoxes = kBlockN % 64 == 0;
  static constexpr int kBoxColumns = kFullBoxes ? 64 : 16;
  static constexpr int kStageColumns = gemm_sm90_stage_columns(kBlockN);
  static constexpr int kRowPitch = kBlockN * 2 + 16;  // 16 bytes of padding against bank conflicts
  static_assert(kConsumers >= 1 && kConsumers <= 3, "one to three consumer warpgroups");
  static_assert(kConsumers == 1 ||
                    kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers),
                "the consumers would wait for registers that are never released");
  static_assert(!kPingpong || kConsumers == 2, "pingpong takes two consumers");
  static_assert(kConsumerRows % 64 == 0, "a consumer's rows are a multiple of 64");
  static_assert(kBlockN % 16 == 0, "the columns are a multiple of the narrow boxes");
  static_assert(kFullBoxes || kTakesEpilogue || kTriangular,
                "tiles without an epilogue have no staging buffer for rows");
  static_assert(kCluster == 1 || kCluster == 2, "a cluster has one block or two");
  static_assert(!kTriangular || kCluster == 1, "the strips of a triangle have any number of tiles");
  static_assert(kGrouping == Grouping::kNone || kCluster == 1,
                "the blocks of a cluster would take tiles of two groups");
  static_assert(!kRowGroups || (kGroups == 1 && kSlicesM == 2), "has_lone_slice() leaves out half of a tile");
  static_assert(kStages >= 2, "a stage is released one step after its use, so a single stage would deadlock");
};

/// A tile whose accumulators start from C.
template <class Base>
struct ChainedTile : Base {
  static constexpr bool kChained = true;
};

inline int divide_up(int x, int by) { return (x + by - 1) / by; }

/// Bytes of a consumer's staging buffer; kFloat: results are fp32, else 16 bits.
template <bool kFloat, class Tile>
constexpr int staging_bytes() {
  constexpr int kTwoBoxes = 2 * kSliceBytes;  // the slots of the TMA epilogue
  constexpr int kRows = 64 * Tile::kRowPitch;
  if (Tile::kTriangular) return kTwoBoxes;
  if (!kFloat && !Tile::kTakesEpilogue) return 64 * Tile::kStageColumns * 2;
  return Tile::kFullBoxes || kRows < kTwoBoxes ? kTwoBoxes : kRows;
}
/// Columns of fp32 sums of 64 rows that fit into it.
template <bool kFloat, class Tile>
constexpr int staged_columns() {
  constexpr int kFit = staging_bytes<kFloat, Tile>() / (64 * 4), kWanted = Tile::kBlockN < kFit ? Tile::kBlockN : kFit;
  return kWanted >= 64 ? 64 : kWanted >= 32 ? 32 : 16;
}

/// Shared memory through which a consumer and its scheduler warp communicate: mbarriers and words. A barrier's comment
/// names the threads that arrive and what they signal.
struct Mailbox {
  uint32_t at;
  static constexpr int kBytes = 112;
  AK_DEVICE uint32_t work_full() const { return at; }            ///< scheduler warp: work() holds the next tile
  AK_DEVICE uint32_t work_empty() const { return at + 8; }       ///< consumer's warps: work() has been read
  AK_DEVICE uint32_t slot_requested() const { return at + 16; }  ///< consumer: slots may be filled, if is_last_split()
  /// Scheduler warp or TMA: the consumer may use the slot.
  AK_DEVICE uint32_t slot_ready(int slot) const { return at + 24 + slot * 8; }
  /// Consumer's warps: the slot may be stored.
  AK_DEVICE uint32_t slot_done(int slot) const { return at + 40 + slot * 8; }
  AK_DEVICE uint32_t is_last_split() const { return at + 56; }  ///< split k: the consumer's part arrived last
  AK_DEVICE uint32_t work() const { return at + 64; }           ///< the consumer's next tile
  AK_DEVICE uint32_t place() const { return at + 96; }          ///< scheduler warp: the tile whose boxes it moves
};

/// Shared memory, from the first 1,024-byte boundary: stages of A, stages of B, staging buffers, two barriers per
/// stage, mailboxes.
template <bool kFloat, class Tile>
constexpr int bytes_before_mailboxes() {
  return Tile::kStages * (Tile::kBytesA + Tile::kBytesB + 16) + Tile::kConsumers * staging_bytes<kFloat, Tile>();
}
template <bool kFloat, class Tile>
constexpr int shared_bytes() {
  static_assert(bytes_before_mailboxes<kFloat, Tile>() % 16 == 0, "a mailbox holds vectors of 16 bytes");
  constexpr int kAlignment = 1024;
  return kAlignment + bytes_before_mailboxes<kFloat, Tile>() + Tile::kConsumers * Mailbox::kBytes;
}

/// Tile schedule.
struct Schedule {
  int tile_columns;        // columns of C per tile: kBlockN, or half of that with swiglu
  int lines, line_length;  // in clusters: a line is a row of clusters' tiles, or a column if by_columns
  bool by_columns;
  int tiles;         // of a matrix
  int raster_lines;  // lines rasterized together, so that their slices of A and B stay in L2
  int work_count;    // work items of all clusters: tiles x batch x splits
  int clusters;      // of the grid
  int k_steps, k_steps_per_split;
  int splits;
  int batch_a, batch_b;  // 0 if the batch shares one matrix, else 1
  float* partials;
  uint32_t* counters;
};

/// Direct store of the accumulators, into C or, as pre-activations, into z.
enum class DirectStore {
  kNone,
  kIdentity,   ///< sums
  kScaled,     ///< alpha * sums
  kBias,       ///< sums + bias per column, of the type of A and B
  kFloatBias,  ///< sums + bias per column, fp32
  kUnaligned,  ///< alpha * sums + either bias, into unaligned rows; stored by the threads
};
/// Epilogue that computes C from the accumulators and other operands.
enum class FusedEpilogue {
  kNone,
  kTma,          ///< TMA moves C and the auxiliary input
  kElementwise,  ///< any alignment, strides and types
};
/// Effect on C.
enum class Output {
  kRounded,
  kFloat,
  kAccumulate,  ///< adds to an fp32 C
};
struct EpiloguePath {
  DirectStore direct;
  FusedEpilogue fused;
};

/// GemmValues with strides in bytes.
struct Operand {
  char* data;
  int64_t row_bytes, column_bytes, batch_bytes;
  DType type;
};
inline Operand operand(const GemmValues& t) {
  const int64_t size = bytes_of(t.type);
  return {static_cast<char*>(t.data), t.row_stride * size, t.column_stride * size, t.batch_stride * size, t.type};
}

/// GemmEpilogue and C.
struct Epilogue {
  float alpha, beta, diagonal;
  Activation activation;
  Operand c, bias, residual, z, preact;
  float* column_sums;
};

/// Groups of a grouped product; each end is clamped to [previous end, total].
struct GroupEnds {
  const int32_t* offs;
  int64_t stride;
  int count;
  int total;  // rows of A or terms
};

struct Args {
  Epilogue epilogue;
  EpiloguePath path;
  bool float_bias;
  bool reads_aux;           // the TMA epilogue reads residual or pre-activation
  bool needs_slot_request;  // slots are filled on request: z is staged there first, or the part may not be the last
  bool stores_z_first;
  bool has_slow_exit;  // between main loop and store: a split-k reduction or a slot request
  int aux_batched;     // 0 if the batch shares the auxiliary input, else 1
  Output output;
  int m, n, k;       // of the product of A and B
  int columns;       // of C per matrix: n, or n / 2 with swiglu
  int tile_columns;  // as in the schedule
  int second_half;   // columns of B from the first half of a tile to the second: kBlockN / 2, or n / 2 with swiglu
  int value_gap;     // columns of B between the two halves
  int more_a[2];     // first columns, or if A is m-major rows, of its second and third matrix
  Schedule schedule;
  GroupEnds groups;
};

/// One work item of a block.
struct Work {
  int m, n;               // first row and column in C
  int batch;              // or group; past the last group of rows, the rows that are in none
  int first_step, steps;  // of k
  int split;
  int tile;        // index of the tile in scratch
  int begin, end;  // of the group's rows or terms
};

/// The row of C at which the rows of a tile end.
template <class Tile>
AK_DEVICE int end_of_rows(const Args& args, const Work& work) {
  return Tile::kRowGroups ? work.end : args.m;
}

/// True if the rows of a tile end within its first 64: then the others are not loaded, multiplied or stored.
template <class Tile>
AK_DEVICE bool has_lone_slice(const Work& work) {
  return Tile::kRowGroups && work.end <= work.m + 64;
}

/// The bias of a tile, or null: a group has its own, and rows in no group have none.
template <class Tile>
AK_DEVICE const char* bias_of_tile(const Args& args, int batch) {
  const Operand& bias = args.epilogue.bias;
  if (!Tile::kRowGroups || !bias.data) return bias.data;
  return batch < args.groups.count ? bias.data + batch * bias.batch_bytes : nullptr;
}

/// Selects the direct store by TMA.
inline DirectStore direct_store(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  if (e.bias.data) return e.bias.type == q.type ? DirectStore::kBias : DirectStore::kFloatBias;
  return e.alpha == 1.0f ? DirectStore::kIdentity : DirectStore::kScaled;
}

/// `as_float`: the instance of the kernel for an fp32 C.
inline EpiloguePath epilogue_path(const GemmProblem& q, bool as_float) {
  const bool rows = gemm_sm90_has_rows(q) && as_float == (q.c.type == DType::kFloat32);
  if (rows && gemm_sm90_in_registers(q))
    return {gemm_sm90_tma_writes(q) ? direct_store(q) : DirectStore::kUnaligned, FusedEpilogue::kNone};
  if (!rows || !gemm_sm90_tma_epilogue(q)) return {DirectStore::kNone, FusedEpilogue::kElementwise};
  return {q.epilogue.z.data ? direct_store(q) : DirectStore::kNone, FusedEpilogue::kTma};
}

template <bool kFloat, class Tile>
Args arguments(const GemmProblem& q, int splits) {
  const bool halved = is_halved(q);
  GemmProblem p = q;
  if (q.accumulate && epilogue_path(q, kFloat).fused != FusedEpilogue::kNone) {
    p.epilogue.residual = q.c;  // only direct stores can accumulate by TMA
    p.epilogue.beta = 1.0f;
  }
  const GemmEpilogue& e = p.epilogue;
  Args args{};
  args.epilogue = {e.alpha,           e.beta,          e.diagonal,          e.activation,
                   operand(q.c),      operand(e.bias), operand(e.residual), operand(e.z),
                   operand(e.preact), e.column_sums};
  args.path = epilogue_path(p, kFloat);
  // The matrices of z's map would be its halves, but the map clips at the end of a group instead.
  if (Tile::kRowGroups && halved && e.z.data) args.path = {DirectStore::kNone, FusedEpilogue::kElementwise};
  args.float_bias = !e.bias.data || e.bias.type == DType::kFloat32;
  args.reads_aux = args.path.fused == FusedEpilogue::kTma && (e.preact.data || e.residual.data);
  args.stores_z_first = args.path.fused == FusedEpilogue::kTma && e.z.data;
  args.needs_slot_request = args.stores_z_first || (args.path.fused == FusedEpilogue::kTma && splits > 1);
  args.has_slow_exit = splits > 1 || args.needs_slot_request;
  args.aux_batched = (e.preact.data ? e.preact : e.residual).batch_stride != 0;
  args.output = q.accumulate ? Output::kAccumulate : kFloat ? Output::kFloat : Output::kRounded;
  args.m = q.m, args.n = q.n, args.k = q.k;
  args.columns = columns_of_sums(q);
  args.tile_columns = halved ? Tile::kBlockN / 2 : Tile::kBlockN;
  args.second_half = halved ? q.n / 2 : Tile::kBlockN / 2;
  args.value_gap = args.second_half - Tile::kBlockN / 2;
  for (int i = 0; i < 2; i++) args.more_a[i] = q.more_a[i].begin;
  return args;
}

}  // namespace gemm
}  // namespace ak
