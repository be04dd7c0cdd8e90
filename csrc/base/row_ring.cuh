#pragma once
// Streams rows of matrices through shared memory. A team of kWarps warps takes every n-th row and holds it in
// registers, kColumns columns per thread, or, if too long, reads it from shared memory in parts. cp.async meanwhile
// loads the team's next rows into its own ring of slots. So bytes in flight cost no registers and do not depend on
// types, and a team of one warp needs no barrier. One block fills an SM. Teams of a cluster's blocks can share longer
// rows: each has a slice of consecutive columns, and the blocks exchange their sums through distributed shared memory.
#include <algorithm>
#include <cstdint>

#include "base/row.cuh"
#include "device/async_copy.cuh"
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/mbarrier.cuh"

namespace ak {

inline constexpr int kRingVec =
    4;  ///< columns of a vector: 16 bytes of fp32; a warp's 16-bit ones are 256 bytes in one

/// A matrix whose rows the ring loads; absent if data is null. `stride`: elements between rows.
struct RingMatrix {
  const void* data;
  DType dtype;
  int64_t stride;

  AK_HD int row_bytes(int columns) const { return data == nullptr ? 0 : columns * bytes_of(dtype); }
};

/// kTeamWarps warps that share a row, in each of kBlocks blocks of a cluster; a thread holds kThreadColumns of its
/// columns. Clusters need device_runs_sm90_code().
template <int kTeamWarps, int kThreadColumns, int kBlocks = 1>
struct RowTeam {
  static constexpr int kWarps = kTeamWarps, kColumns = kThreadColumns, kCluster = kBlocks;
  static constexpr int kThreads = kWarps * kWarpThreads;
  static constexpr bool kLong = kWarps * kColumns > 256;  // more than kRingColumns
  /// Slots of a team. A row that fills most of shared memory has one, which is free once the row is in registers.
  static constexpr int kStages = kLong ? 1 : kWarps == 16 ? 2 : std::max(2, (kCluster > 1 ? 48 : 72) / kColumns);

  /// Columns of a block, except that the last block of a cluster has what remains: whole lines of 128 bytes.
  AK_HD static int slice(int columns) {
    return kCluster == 1 ? columns : (columns + kCluster * 64 - 1) / (kCluster * 64) * 64;
  }
};

template <class Team, int kMatrices>
class RowRing {
 public:
  /// Starts the copies of the team's first rows.
  AK_DEVICE RowRing(const RingMatrix (&matrices)[kMatrices], int64_t rows, int columns, int teams)
      : rows_(rows), columns_(columns), teams_(teams) {
    if constexpr (Team::kCluster > 1) {
      begin_ = static_cast<int>(cluster_rank()) * Team::slice(columns);
      columns_ = std::min(Team::slice(columns), columns - begin_);
      if (leads()) {
        for (int turn = 0; turn < 2; turn++) mbarrier_init(exchange_barrier(turn), 1);
        mbarrier_init_fence();
      }
    }
    AK_UNROLL
    for (int m = 0; m < kMatrices; m++) {
      matrices_[m] = matrices[m];
      slot_bytes_ += matrices[m].row_bytes(columns_);
    }
    slot_ = slots_of(team());
    int64_t row = first();
    AK_NO_UNROLL
    for (int stage = 0; stage < Team::kStages; stage++, row += step()) {
      copy(row);
      turn();
    }
    if constexpr (Team::kCluster > 1) cluster_sync();  // the barriers are initialized
  }

  /// This block's columns of the rows.
  AK_DEVICE int begin() const { return begin_; }
  AK_DEVICE int columns() const { return columns_; }
  /// Blocks or clusters, and the index of this one.
  AK_DEVICE static int groups() { return grid_blocks() / Team::kCluster; }
  AK_DEVICE static int group() { return block_index() / Team::kCluster; }

  /// The rows of this team: for (row = first(); row < rows; row += step()).
  AK_DEVICE int64_t first() const { return static_cast<int64_t>(team()) * groups() + group(); }
  AK_DEVICE int64_t step() const { return static_cast<int64_t>(teams_) * groups(); }
  AK_DEVICE bool leads() const { return thread_index() % Team::kThreads == 0; }

  /// Waits for the next row, for read().
  AK_DEVICE void wait() const {
    copy_wait<Team::kStages - 1>();
    sync();
  }
  AK_DEVICE void read(float (&values)[Team::kColumns], int matrix, float outside = 0.0f) const {
    AK_UNROLL
    for (int j = 0; j < Team::kColumns; j++) values[j] = outside;
    visit(matrix, [&](int j, float x) { values[j] = x; });
  }
  /// Adds the matrix's row to the values.
  AK_DEVICE void add(float (&values)[Team::kColumns], int matrix) const {
    visit(matrix, [&](int j, float x) { values[j] += x; });
  }
  /// Calls f(index, value) for this thread's columns of the row.
  template <class F>
  AK_DEVICE void visit(int matrix, F f) const {
    with_row_dtype(matrices_[matrix].dtype, [&]<class T>(T) {
      for_each_held<Team::kThreads, kRingVec, Team::kColumns>(columns_, [&](int held, int column) {
        const auto v = vector<T>(matrix, column);
        AK_UNROLL
        for (int j = 0; j < kRingVec; j++) f(held + j, v[j]);
      });
    });
  }

  /// Columns between consecutive vectors of a thread.
  static constexpr int kStep = Team::kThreads * kRingVec;
  /// Reads a row in its slot: calls f<n>(column) for n vectors of this thread from that column on, kStep apart; kTimes
  /// at a time and then one by one. After each call all lanes of the warp, including those out of bounds, call
  /// after<n>(column of the first lane).
  template <int kTimes, class F, class After>
  AK_DEVICE void for_each_vectors(F f, After after) const {
    const int lane = lane_index() * kRingVec;
    int begin = first_column<Team::kThreads, kRingVec>() - lane;  // uniform in the warp, so that it does not diverge
    AK_NO_UNROLL
    for (; begin + (kTimes - 1) * kStep + kWarpThreads * kRingVec <= columns_; begin += kTimes * kStep) {
      f.template operator()<kTimes>(begin + lane);
      after.template operator()<kTimes>(begin);
    }
    AK_NO_UNROLL
    for (; begin < columns_; begin += kStep) {
      if (begin + lane < columns_) f.template operator()<1>(begin + lane);
      after.template operator()<1>(begin);
    }
  }
  template <int kTimes, class F>
  AK_DEVICE void for_each_vectors(F f) const {
    for_each_vectors<kTimes>(f, []<int>(int) {});
  }
  /// The vector at a column of a matrix of type T.
  template <class T>
  AK_DEVICE Vec<float, kRingVec> vector(int matrix, int column) const {
    const Packed<T, kRingVec> words = vector_at<T>(matrix, column)[0];
    return unpacked<T>(words);
  }
  /// Overwrites the vector at a column.
  template <class T>
  AK_DEVICE void replace(int matrix, int column, const Vec<T, kRingVec>& v) const {
    vector_at<T>(matrix, column)[0] = packed(v);
  }
  /// The value at a column of the row.
  AK_DEVICE float value(int column, int matrix) const {
    float result = 0.0f;
    with_row_dtype(matrices_[matrix].dtype,
                   [&]<class T>(T) { result = to_float(shared_at<T>(place(matrix))[column]); });
    return result;
  }
  /// Releases the row's slot to the team's row kStages later.
  AK_DEVICE void refill(int64_t row) {
    sync();
    copy(row + Team::kStages * step());
    turn();
  }

  /// Address of the team's next row in a matrix of type T; null if there is none.
  template <class T>
  AK_DEVICE const T* next_row(int64_t row, int matrix) const {
    const RingMatrix& m = matrices_[matrix];
    return row + step() < rows_ ? static_cast<const T*>(m.data) + (row + step()) * m.stride : nullptr;
  }
  /// Called when a warp has read kVectors vectors of a row, from column `begin` on, for the last time: copies the same
  /// columns of the next row over them. Call refilled() after all vectors.
  template <int kVectors, class T>
  AK_DEVICE void refill_vectors(const T* next, int matrix, int begin) const {
    constexpr int kColumnsOfWord = kWord / sizeof(T), kWords = kWarpThreads * kRingVec / kColumnsOfWord;
    warp_sync();
    const int lane = lane_index(), first = begin + lane / kWords * kStep + lane % kWords * kColumnsOfWord;
    if (next == nullptr || (kVectors == 1 && (lane >= kWords || first >= columns_))) return;
    AK_UNROLL
    for (int k = 0; k < kVectors; k += kWarpThreads / kWords)
      copy_async<kWord>(place(matrix) + (first + k * kStep) * sizeof(T), next + first + k * kStep);
  }
  AK_DEVICE void refilled() const { copy_commit(); }

  /// Waits until the slots are free, after the last row.
  AK_DEVICE void finish() const {
    copy_wait<0>();
    sync();
  }

  /// Reduces each value by `op` over the threads of the team, in a fixed order.
  template <int N, class Op>
  AK_DEVICE void reduce(float (&values)[N], Op op) {
    AK_UNROLL
    for (int i = 0; i < N; i++) values[i] = warp_reduce(values[i], op);
    if constexpr (Team::kWarps > 1) {
      static_assert(N * 4 <= kSumBytes);
      // Double-buffered: the barrier of the call in between protects a buffer's reuse.
      const auto of_warp = shared_at<float>(dynamic_shared() + ((team() * 2 + turn_) * Team::kWarps) * kSumBytes);
      turn_ ^= 1;
      AK_UNROLL
      for (int i = 0; i < N; i++) {
        if (lane_index() == 0) of_warp[i * Team::kWarps + warp_index() % Team::kWarps] = values[i];
      }
      sync();
      AK_UNROLL
      for (int i = 0; i < N; i++) {
        values[i] = of_warp[i * Team::kWarps];
        AK_UNROLL
        for (int w = 1; w < Team::kWarps; w++)
          values[i] = op(values[i], static_cast<float>(of_warp[i * Team::kWarps + w]));
      }
    }
  }
  template <int N>
  AK_DEVICE void sum(float (&values)[N]) {
    if constexpr (Team::kCluster > 1) {
      sum_over_cluster(values);
    } else {
      reduce(values, [](float a, float b) { return a + b; });
    }
  }

  /// The slots of this team, and of any, for other use after finish(): at least 8 bytes per column.
  AK_DEVICE uint32_t own_slots() const { return slots_of(opaque(team())); }  // recomputed: holds no register
  AK_DEVICE uint32_t slots_of(int team) const {
    return dynamic_shared() + sum_bytes(teams_) + team * Team::kStages * slot_bytes_;
  }

  /// Shared memory of a block in bytes.
  static int shared_bytes(const RingMatrix (&matrices)[kMatrices], int columns, int teams) {
    int bytes = 0;
    for (const RingMatrix& m : matrices) bytes += m.row_bytes(Team::slice(columns));
    return sum_bytes(teams) + teams * Team::kStages * bytes;
  }

 private:
  static constexpr int kSumBytes = 8;  // per warp, for up to two values

  // A team that shares rows with teams of other blocks has two buffers of the warps' sums and two mbarriers, in turn.
  static constexpr int kSharers = Team::kCluster * Team::kWarps;  // warps that share a row
  static constexpr int kExchangeBytes = Team::kCluster == 1 ? 0 : 2 * (kSharers + 1) * kSumBytes;
  AK_DEVICE uint32_t exchanged(int turn) const {
    return dynamic_shared() + team() * kExchangeBytes + turn * kSharers * kSumBytes;
  }
  AK_DEVICE uint32_t exchange_barrier(int turn) const { return exchanged(2) + turn * 8; }

  /// Adds the values of all warps that share the row, in an order that gives all of them the same bits: each warp sends
  /// its own to all blocks. A warp may overwrite a buffer two calls later: in between it waits for the values that all
  /// warps send after they have read the buffer.
  AK_DEVICE void sum_over_cluster(float (&values)[2]) {
    constexpr auto add = [](float a, float b) { return a + b; };
    const int turn = exchanges_ & 1, parity = exchanges_ >> 1 & 1, lane = lane_index();
    exchanges_++;
    const uint32_t buffer = exchanged(turn), barrier = exchange_barrier(turn);
    AK_UNROLL
    for (float& value : values) value = warp_reduce(value, add);
    if (leads()) mbarrier_arrive_expect_tx(barrier, kSharers * kSumBytes);
    if (lane < Team::kCluster) {
      const uint32_t sharer = cluster_rank() * Team::kWarps + warp_index() % Team::kWarps;
      store_cluster_2(buffer + sharer * kSumBytes, barrier, static_cast<uint32_t>(lane), values[0], values[1]);
    }
    mbarrier_wait(barrier, parity);
    values[0] = values[1] = 0.0f;
    AK_UNROLL
    for (int k = 0; k < kSharers; k += kWarpThreads) {
      if (kSharers % kWarpThreads != 0 && k + lane >= kSharers) break;
      const auto of_sharer = load_shared_2(buffer + (k + lane) * kSumBytes);
      values[0] += of_sharer[0];
      values[1] += of_sharer[1];
    }
    AK_UNROLL
    for (float& value : values) value = warp_reduce(value, add);
  }

  /// Address of the matrix's row in the slot.
  AK_DEVICE uint32_t place(int matrix) const {
    uint32_t at = slot_;
    AK_UNROLL
    for (int m = 0; m < matrix; m++) at += matrices_[m].row_bytes(columns_);
    return at;
  }

  template <class T>
  AK_DEVICE auto vector_at(int matrix, int column) const {
    return shared_at<Packed<T, kRingVec>>(place(matrix) + column * sizeof(T));
  }

  AK_HD static int sum_bytes(int teams) {
    if (Team::kCluster > 1) return teams * kExchangeBytes;
    return Team::kWarps == 1 ? 0 : teams * 2 * Team::kWarps * kSumBytes;
  }
  AK_DEVICE static int team() { return thread_index() / Team::kThreads; }

  AK_DEVICE void sync() const {
    if constexpr (Team::kWarps == 1) {
      warp_sync();
    } else {
      named_barrier(1 + team(), Team::kThreads);
    }
  }
  /// Starts the copies of a row, if it exists, into the slot.
  AK_DEVICE void copy(int64_t row) const {
    if (row < rows_) {
      constexpr int kApart = Team::kThreads * kWord;
      const int first = thread_index() % Team::kThreads * kWord;
      uint32_t to = slot_ + first;
      AK_UNROLL
      for (int m = 0; m < kMatrices; m++) {
        if (matrices_[m].data == nullptr) continue;
        const int bytes = matrices_[m].row_bytes(columns_);
        const int64_t at_row = (row * matrices_[m].stride + begin_) * bytes_of(matrices_[m].dtype);
        const auto* from = opaque(static_cast<const uint8_t*>(matrices_[m].data) + at_row + first);
        if constexpr (Team::kColumns > 0) {
          AK_UNROLL
          for (int at = 0; at < Team::kColumns * 4 * Team::kThreads; at += kApart) {
            if (at + first < bytes) copy_async<kWord>(to + at, from + at);
          }
        } else {
          AK_NO_UNROLL
          for (int at = 0; at + first < bytes; at += kApart) copy_async<kWord>(to + at, from + at);
        }
        to += bytes;
      }
    }
    copy_commit();
  }
  AK_DEVICE void turn() {
    stage_ = stage_ + 1 == Team::kStages ? 0 : stage_ + 1;
    slot_ = slots_of(team()) + stage_ * slot_bytes_;
  }

  RingMatrix matrices_[kMatrices];
  int64_t rows_;
  int begin_ = 0, columns_, teams_, slot_bytes_ = 0, stage_ = 0, turn_ = 0, exchanges_ = 0;
  uint32_t slot_;
};

/// The most blocks, or clusters, that are resident.
template <class Team>
int ring_groups() {
  return device_sm_count() / Team::kCluster;
}

/// Teams per block: limited by `most`, by shared memory and by the number of rows. 0 if not even one fits.
template <class Team, int kMatrices>
int ring_teams(const RingMatrix (&matrices)[kMatrices], int64_t rows, int columns, int most) {
  const auto bytes = [&](int teams) { return RowRing<Team, kMatrices>::shared_bytes(matrices, columns, teams); };
  const int groups = ring_groups<Team>();
  if (groups == 0) return 0;
  int teams = static_cast<int>(std::min<int64_t>(most, (rows + groups - 1) / groups));
  while (teams > 0 && bytes(teams) > device_shared_limit()) teams--;
  return teams;
}

/// Launches kernel(p, teams), which begins with wait_for_previous_kernel(), with up to `most` teams per block. Sets
/// *groups to the number of blocks or clusters, or to 0 if a team does not fit into shared memory or no cluster the
/// chip; then nothing is launched. A team has at most `most_rows`: a larger grid is not persistent.
template <class Team, int kMatrices, class Kernel, class Problem>
Status launch_ring(const char* name, Kernel kernel, const Problem& p, const RingMatrix (&matrices)[kMatrices],
                   int columns, int most, Stream stream, int64_t* groups, int64_t most_rows = INT32_MAX) {
  const int teams = ring_teams<Team>(matrices, p.rows, columns, most);
  *groups = 0;
  if (teams == 0) return {};
  int64_t resident = ring_groups<Team>();
  LaunchConfig config{
      .name = name,
      .grid = Team::kCluster,
      .block = teams * Team::kThreads,
      .shared_bytes = static_cast<std::size_t>(RowRing<Team, kMatrices>::shared_bytes(matrices, columns, teams)),
      .cluster = Team::kCluster,
      .overlap_previous = true,
      .stream = stream};
  if constexpr (Team::kCluster > 1) {
    resident = std::min<int64_t>(resident, resident_clusters(kernel, config));
    if (resident == 0) return {};
  }
  *groups = std::min<int64_t>(p.rows, std::max<int64_t>(resident, (p.rows - 1) / (most_rows * teams) + 1));
  config.grid = static_cast<int>(*groups) * Team::kCluster;
  return launch(kernel, config, p, teams);
}

/// Warps per SM if each thread holds its columns of three rows in registers.
constexpr int three_row_warps(int columns) { return columns <= 24 ? 16 : 12; }

inline constexpr int kRingColumns = 8192;
/// Calls f with the team for rows of `columns`, at most kRingColumns; Widest if more than 4,096.
template <class Widest, class F>
Status with_row_team(int columns, const F& f) {
  if (columns <= 256) return f(RowTeam<1, 8>{});
  if (columns <= 512) return f(RowTeam<1, 16>{});
  if (columns <= 768) return f(RowTeam<1, 24>{});
  if (columns <= 1024) return f(RowTeam<1, 32>{});
  if (columns <= 2048) return f(RowTeam<4, 16>{});
  if (columns <= 3072) return f(RowTeam<4, 24>{});
  if (columns <= 4096) return f(RowTeam<4, 32>{});
  static_assert(Widest::kThreads * Widest::kColumns == kRingColumns);
  return f(Widest{});
}

inline constexpr int kLongRingColumns = 16384;
using LongRowTeam = RowTeam<16, 32>;  ///< for longer rows, up to kLongRingColumns
inline constexpr int kWideRingColumns = 32768;
using WideRowTeam = RowTeam<16, 64>;  ///< for longer rows, up to kWideRingColumns: takes all registers of an SM
inline constexpr int kResidentColumns = 1 << 17;  ///< upper limit: exceeds shared memory, fits an int
/// For rows longer still, as far as they fit into shared memory: no column is held in registers.
struct ResidentRowTeam {
  static constexpr int kWarps = 16, kColumns = 0, kCluster = 1, kThreads = kWarps * kWarpThreads, kStages = 1;

  AK_HD static int slice(int columns) { return columns; }
};

}  // namespace ak
