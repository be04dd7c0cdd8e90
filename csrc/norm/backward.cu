// norm_backward: the gradients of the rows and of the branch that was added to them; those of weight and bias are sums
// over the rows.
//
// Work: reads grad and x, writes as much as x: 6 bytes and some 25 instructions an element in 16 bits, so memory
// bandwidth is the limit.
//
// Plan. Up to 8,192 columns: a persistent grid of one block an SM; a warp a row up to 1,024 columns, 4 or 8 warps
// beyond. cp.async prefetches the next rows while a row is in registers between the sums over it and the result: 72 KB
// an SM in fp32 and 108 KB in 16 bits for rows of 768 columns. Sums over rows stay in registers until the end; then a
// block adds those of its teams and stores them in its slot, and another kernel adds the slots: 8 bytes written and
// read a column and block, 2 % of the traffic from 5,000 rows on.
//
// Up to 65,536 columns, where the code runs as sm_90 code: the same kernel, with a row in the registers of 4 or 8
// blocks of a cluster. A block has 4,096 columns and two teams of 8 warps, which take turns, or one team and 8,192
// columns. The blocks exchange their sums over the row through distributed shared memory (row_ring.cuh). Each matrix is
// read once. With 4,096 columns of 16 bits, 64 KB an SM are in flight while two rows are in work. Prediction, not
// measured, for 2,048 rows of 32,768 columns in bf16 on an H200: 120 us, sums included, at 85 % of a copy's rate.
//
// Rows that are unaligned, longer or too large for shared memory take the second kernel: a block takes a row, 16
// columns a thread; beyond 8,192 columns it walks the row in pieces and reads them a second time from L2. A block has
// no room for the sums over rows of such lengths. Kept in L2 they cost 16 bytes an element and 35 MB of it at 32,768
// columns: an H200 took 405 us for 2,048 such rows in bf16, a quarter of a copy's rate. So a third kernel computes
// them: a block takes a strip of columns and every n-th row, with four rows in flight a thread, 48 KB an SM in 16 bits.
// It reads both matrices again, 4 bytes an element.
//
// The branch's gradient is the stored one in the branch's dtype: 2 bytes an element written, where a kernel of its own
// would read 4 and write 2.
//
// Traps: no atomics, whose order would change the bits from run to run. A block without a row has no slot, so the grid
// is never larger than the number of rows. The blocks of a cluster have the same rows, so that each waits for as many
// sums as its peers send it.
#include "norm/call.h"

#include <algorithm>

#include "base/row_ring.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "gemm/column_sums.h"
#include "norm/formula.h"

namespace ak {
namespace {

/// Warps an SM: registers hold the columns of n, g, weight and the two sums over rows.
template <class Team>
constexpr int resident_warps() {
  if (Team::kCluster > 1) return 16;
  if (Team::kColumns > 16) return 8;
  return Team::kWarps == 1 ? 16 : 12;
}

/// Adds the sums over rows of the block's teams and stores them in the block's part of a slot.
template <class Team, int kMatrices>
AK_DEVICE void store_sums(const NormBackward& p, const RowRing<Team, kMatrices>& ring, int teams, float* slot,
                          float (&of_weight)[Team::kColumns], float (&of_bias)[Team::kColumns]) {
  const auto pass_on = [&](float (&sums)[Team::kColumns], int parameter) {
    if (p.parameters <= parameter) return;
    const auto to = shared_at<Vec<float, kRingVec>>(ring.own_slots() + parameter * ring.columns() * 4);
    for_each_held<Team::kThreads, kRingVec, Team::kColumns>(ring.columns(), [&](int held, int column) {
      Vec<float, kRingVec> v;
      AK_UNROLL
      for (int j = 0; j < kRingVec; j++) v[j] = sums[held + j];
      to[column / kRingVec] = v;
    });
  };
  pass_on(of_weight, 0);
  pass_on(of_bias, 1);
  block_sync();
  AK_NO_UNROLL
  for (int i = thread_index(); i < p.parameters * ring.columns(); i += teams * Team::kThreads) {
    float sum = 0.0f;
    for (int t = 0; t < teams; t++) sum += shared_at<float>(ring.slots_of(t))[i];
    const int of_bias_too = i >= ring.columns() ? p.columns - ring.columns() : 0;
    store(slot + of_bias_too + i, sum);
  }
}

template <class Team>
AK_DEVICE void norm_backward_rows(const NormBackward& p, int teams) {
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  const float count = static_cast<float>(p.columns);
  RowRing<Team, 3> ring(
      {{p.x, p.x_type, p.columns}, {p.grad, p.grad_type, p.columns}, {p.grad_sum, p.grad_sum_type, p.columns}}, p.rows,
      p.columns, teams);
  float weight[kColumns], of_weight[kColumns] = {}, of_bias[kColumns] = {};
  if (p.weight != nullptr) load_row<kThreads, kRingVec>(weight, p.weight, p.weight_type, ring.begin(), ring.columns());
  // Statistics of the next row, loaded a row ahead.
  float next_mean = 0.0f, next_rstd = 0.0f;
  const auto load_statistics = [&](int64_t row) {
    if (row >= p.rows) return;
    if (p.mean != nullptr) next_mean = load(p.mean + row);
    next_rstd = load(p.rstd + row);
  };
  load_statistics(ring.first());
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const float mean = next_mean, rstd = next_rstd;
    load_statistics(row + ring.step());
    float n[kColumns], g[kColumns];  // n the normalised x; g first the gradient of y, then that of n
    ring.wait();
    ring.read(n, 0);
    ring.read(g, 1);
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) {
      n[j] = normalized(n[j], mean, rstd);
      of_weight[j] = fma(g[j], n[j], of_weight[j]);
      of_bias[j] += g[j];
    }
    if (p.weight != nullptr) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) g[j] *= weight[j];
    }
    float sums[2] = {};  // of g and of g * n; lanes beyond the row have g = 0
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) {
      sums[0] += g[j];
      sums[1] = fma(g[j], n[j], sums[1]);
    }
    ring.sum(sums);
    const float mean_g = p.mean == nullptr ? 0.0f : div(sums[0], count), mean_gn = div(sums[1], count);
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) g[j] = norm_gradient(g[j], n[j], rstd, mean_g, mean_gn);
    if (p.grad_sum != nullptr) {
      ring.read(n, 2);
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) g[j] += n[j];
    }
    ring.refill(row);
    const int64_t at = row * p.columns + ring.begin();
    store_row<kThreads, kRingVec>(g, p.out, p.x_type, at, ring.columns());
    if (p.branch != nullptr) store_row<kThreads, kRingVec>(g, p.branch, p.branch_type, at, ring.columns());
  }
  ring.finish();
  float* slot = p.slots + static_cast<int64_t>(ring.group()) * p.parameters * p.columns + ring.begin();
  if (p.parameters > 0) store_sums(p, ring, teams, slot, of_weight, of_bias);
}

template <class Team>
AK_KERNEL(kWarpThreads* resident_warps<Team>(), 1)
norm_backward_ring_kernel(AK_PARAM(NormBackward) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if constexpr (Team::kCluster == 1 || kHasClusters) norm_backward_rows<Team>(p, teams);
}

/// Launches the first kernel. Sets *groups as launch_ring does.
template <class Team>
Status norm_backward_on_ring(const NormBackward& p, Stream stream, int64_t* groups) {
  return launch_ring<Team, 3>(
      "norm_backward", norm_backward_ring_kernel<Team>, p,
      {{p.x, p.x_type, p.columns}, {p.grad, p.grad_type, p.columns}, {p.grad_sum, p.grad_sum_type, p.columns}},
      p.columns, resident_warps<Team>() / Team::kWarps, stream, groups, kMostChain);
}

constexpr int kClusterColumns = 65536;
/// Calls f with the team for rows of `columns`, more than kRingColumns and at most kClusterColumns. A block has up to
/// 4,096 columns, of which two teams fit an SM, or 8,192.
template <class F>
Status with_cluster_team(int columns, const F& f) {
  if (columns <= 16384) return f(RowTeam<8, 16, 4>{});
  if (columns <= 32768) return f(RowTeam<8, 16, 8>{});
  return f(RowTeam<16, 16, 8>{});
}
/// The most clusters that share the rows.
int64_t norm_backward_clusters(int64_t rows, int columns) {
  if (columns > kClusterColumns || !device_runs_sm90_code()) return 0;
  return blocks_of_rows(rows, columns <= 16384 ? ring_groups<RowTeam<8, 16, 4>>() : ring_groups<RowTeam<8, 16, 8>>());
}

constexpr int kStripThreads = 256, kStripBlocks = 3, kStripRows = 4;  // blocks an SM; rows in flight
template <int kVec>
constexpr int strips(int columns) {
  return (columns - 1) / (kStripThreads * kVec) + 1;
}
/// Blocks a strip, which share its rows.
int64_t strip_shares(int64_t rows, int columns) {
  const int64_t shares = static_cast<int64_t>(kStripBlocks) * device_sm_count() / strips<kRingVec>(columns);
  return blocks_of_rows(rows, std::max<int64_t>(1, shares));
}

/// The sums over rows: block i takes strip i % strips and leaves its sums in slot i / strips.
template <int kVec>
AK_KERNEL(kStripThreads, kStripBlocks)
norm_backward_sums_kernel(AK_PARAM(NormBackward) p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int count = strips<kVec>(p.columns), share = block_index() / count, shares = grid_blocks() / count;
  const int column = (block_index() % count * kStripThreads + thread_index()) * kVec;
  if (column >= p.columns) return;
  Vec<float, kVec> of_weight{}, of_bias{};
  with_row_dtype(p.x_type, [&]<class X>(X) {
    with_row_dtype(p.grad_type, [&]<class G>(G) {
      AK_NO_UNROLL
      for (int64_t row = share; row < p.rows; row += kStripRows * shares) {
        Vec<X, kVec> x[kStripRows];
        Vec<G, kVec> g[kStripRows];
        AK_UNROLL
        for (int i = 0; i < kStripRows; i++) {
          const int64_t at = (row + i * shares) * p.columns + column;
          if (row + i * shares >= p.rows) break;
          x[i] = load_vec<kVec>(static_cast<const X*>(p.x) + at);
          g[i] = load_vec<kVec>(static_cast<const G*>(p.grad) + at);
        }
        AK_UNROLL
        for (int i = 0; i < kStripRows; i++) {
          const int64_t r = row + i * shares;
          if (r >= p.rows) break;
          const float mean = p.mean == nullptr ? 0.0f : load(p.mean + r), rstd = load(p.rstd + r);
          AK_UNROLL
          for (int j = 0; j < kVec; j++) {
            of_weight[j] = fma(to_float(g[i][j]), normalized(to_float(x[i][j]), mean, rstd), of_weight[j]);
            of_bias[j] += to_float(g[i][j]);
          }
        }
      }
    });
  });
  float* slot = p.slots + static_cast<int64_t>(share) * p.parameters * p.columns + column;
  store_vec(slot, of_weight);
  if (p.parameters > 1) store_vec(slot + p.columns, of_bias);
}

/// The gradient of rows and, if a block holds a whole row, the sums over rows.
template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
norm_backward_kernel(AK_PARAM(NormBackward) p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kPiece = kThreads * kHeld;
  const float count = static_cast<float>(p.columns);
  RowValues of_weight = {}, of_bias = {};
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const int64_t at = row * p.columns;
    const float mean = p.mean == nullptr ? 0.0f : load(p.mean + row), rstd = load(p.rstd + row);
    RowValues n, g;  // n the normalised x; g first the gradient of y, then that of n
    const auto take = [&](int begin) {
      load_row<kThreads, kVec>(n, p.x, p.x_type, at + begin, p.columns - begin);
      load_row<kThreads, kVec>(g, p.grad, p.grad_type, at + begin, p.columns - begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) n[j] = normalized(n[j], mean, rstd);
    };
    const auto weigh = [&](int begin) {
      if (p.weight == nullptr) return;
      RowValues weight;
      load_row<kThreads, kVec>(weight, p.weight, p.weight_type, begin, p.columns - begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) g[j] *= weight[j];
    };

    SumOfPieces<kWhole> sum_g = 0, sum_gn = 0;
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      take(begin);
      if constexpr (kWhole) {
        AK_UNROLL
        for (int j = 0; j < kHeld; j++) {
          of_weight[j] = fma(g[j], n[j], of_weight[j]);
          of_bias[j] += g[j];
        }
      }
      weigh(begin);
      float of_g = 0.0f, of_gn = 0.0f;
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) {
        of_g += g[j];
        of_gn = fma(g[j], n[j], of_gn);
      }
      sum_g += of_g;
      sum_gn += of_gn;
    }
    const float mean_g = p.mean == nullptr ? 0.0f : div(block_sum<kThreads>(static_cast<float>(sum_g)), count);
    const float mean_gn = div(block_sum<kThreads>(static_cast<float>(sum_gn)), count);

    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      if constexpr (!kWhole) {
        take(begin);
        weigh(begin);
      }
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) g[j] = norm_gradient(g[j], n[j], rstd, mean_g, mean_gn);
      if (p.grad_sum != nullptr) {
        load_row<kThreads, kVec>(n, p.grad_sum, p.grad_sum_type, at + begin, p.columns - begin);
        AK_UNROLL
        for (int j = 0; j < kHeld; j++) g[j] += n[j];
      }
      store_row<kThreads, kVec>(g, p.out, p.x_type, at + begin, p.columns - begin);
      if (p.branch != nullptr) store_row<kThreads, kVec>(g, p.branch, p.branch_type, at + begin, p.columns - begin);
    }
  }
  if constexpr (kWhole) {
    float* slot = p.slots + static_cast<int64_t>(block_index()) * p.parameters * p.columns;
    if (p.parameters > 0) store_row<kThreads, kVec>(of_weight, slot, DType::kFloat32, 0, p.columns);
    if (p.parameters > 1) store_row<kThreads, kVec>(of_bias, slot, DType::kFloat32, p.columns, p.columns);
  }
}

/// Writes the sums over rows into the slots, one slot a share of the rows; kVec columns a thread.
template <int kVec>
Status strip_sums(const NormBackward& p, int64_t shares, Stream stream) {
  const LaunchConfig config{.name = "norm_backward_sums",
                            .grid = static_cast<int>(shares * strips<kVec>(p.columns)),
                            .block = kStripThreads,
                            .overlap_previous = true,
                            .stream = stream};
  return launch(norm_backward_sums_kernel<kVec>, config, p);
}

/// Blocks of the second kernel, which is persistent. The first kernel has fewer.
int64_t norm_backward_blocks(int64_t rows, int columns) {
  const int per_sm = columns <= 32 * kHeld ? 16 : columns <= 128 * kHeld ? 4 : 1;
  return blocks_of_rows(rows, static_cast<int64_t>(per_sm) * device_sm_count());
}

}  // namespace

int64_t norm_backward_slots(int64_t rows, int columns, int parameters) {
  if (rows == 0) return 0;
  const int64_t slots = columns <= kRingColumns
                            ? norm_backward_blocks(rows, columns)
                            : std::max(strip_shares(rows, columns), norm_backward_clusters(rows, columns));
  return slots * columns * parameters;
}

Status norm_backward(const NormBackward& p, Stream stream) {
  if (p.rows == 0) return {};
  bool aligned = true;  // absent tensors count as aligned
  for (const void* data : {p.grad, p.x, p.weight, p.grad_sum, static_cast<const void*>(p.out),
                           static_cast<const void*>(p.branch), static_cast<const void*>(p.slots)})
    aligned = aligned && rows_aligned(data, p.columns);
  int64_t blocks = 0;
  Status status;
  const auto on_ring = [&]<class Team>(Team) { return norm_backward_on_ring<Team>(p, stream, &blocks); };
  if (aligned && p.columns <= kRingColumns) {
    status = with_row_team<RowTeam<8, 32>>(p.columns, on_ring);
  } else if (aligned && norm_backward_clusters(p.rows, p.columns) > 0) {
    status = with_cluster_team(p.columns, on_ring);
  }
  const bool on_blocks = blocks == 0;
  if (on_blocks) {
    blocks = norm_backward_blocks(p.rows, p.columns);
    status = with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
      const LaunchConfig config{.name = "norm_backward",
                                .grid = static_cast<int>(blocks),
                                .block = kThreads,
                                .overlap_previous = true,
                                .stream = stream};
      return launch(norm_backward_kernel<kThreads, kVec, kWhole>, config, p);
    });
  }
  if (!status.ok() || p.parameters == 0) return status;
  if (on_blocks && p.columns > kRingColumns) {
    blocks = strip_shares(p.rows, p.columns);
    status = aligned ? strip_sums<kRingVec>(p, blocks, stream) : strip_sums<1>(p, blocks, stream);
    if (!status.ok()) return status;
  }
  return add_slots(p.slots, blocks, p.parameters * static_cast<int64_t>(p.columns), p.sums, stream);
}

}  // namespace ak
