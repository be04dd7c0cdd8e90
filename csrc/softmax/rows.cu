// softmax_rows and softmax_rows_backward: softmax and log-softmax of rows, and their gradients.
//
// Work: forward reads x (and a byte of mask) and writes y, backward reads two matrices and writes one: 4 to 6 bytes, an
// exponential of the special function unit and some 10 instructions an element in 16 bits, so memory bandwidth is the
// limit.
//
// Plan. Up to 8,192 columns a row is in the registers of a team, a warp or 4 or 8, through the passes for maximum, sum
// and result, while cp.async prefetches the next rows and their mask bytes are loaded a row ahead: 32 to 64 KB an SM in
// flight for 16-bit rows of 128 columns and more, where 4.25 TB/s of reads and writes need some 13 KB of reads in
// flight (800 ns of latency). Some 17 instructions an element are two thirds of what an SM can issue at that rate. A
// row costs 140 more, which are the limit below 300 columns.
//
// Longer rows and unaligned rows or masks take the second kernel, a block a row, staged through shared memory
// (row_pieces.cuh). It reads and writes words of 16 bytes wherever a row begins, and the order of its sums does not
// depend on that. If two rows fit (16 bits: up to 58,000 columns) each is read once, and one is prefetched while one is
// in work; a longer row is read twice, the second time from L2. Each thread keeps the maximum of its share and the sum
// relative to it. Some 22 instructions an element, where an SM can issue 25 at that rate: arbitrary addresses cost one
// column at a time. A result of another width than x, or than both gradients, is stored element by element.
//
// Traps: lanes beyond the row must be -inf, not 0. A thread that has seen only -inf must not compute -inf - (-inf), nor
// 0 * exp(0 - a very negative base). The maximum of a row with NaN may be -inf, which does not make the row fully
// masked: its sum tells.
#include "softmax/call.h"

#include <algorithm>

#include "base/row_pieces.cuh"
#include "base/row_ring.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "softmax/exp_sum.cuh"
#include "softmax/formula.h"

namespace ak {
namespace {

/// x and the mask.
struct SoftmaxPieces {
  const SoftmaxRows& p;
  AK_DEVICE const uint8_t* at(int m, int64_t row) const {
    return m == 0 ? element(p.x, p.x_type, row * p.columns) : p.mask.row(row);
  }
  AK_DEVICE bool reads(int64_t) const { return true; }
};

template <int kThreads>
AK_KERNEL(kThreads, kPieceThreads / kThreads)
softmax_rows_kernel(AK_PARAM(SoftmaxRows) p, AK_PARAM(PieceShape) shape) {
  wait_for_previous_kernel();
  allow_next_kernel();
  RowPieces<kThreads, 2, SoftmaxPieces> pieces({bytes_of(p.x_type), p.mask.data != nullptr}, p.rows, p.columns, shape,
                                               {p});
  AK_NO_UNROLL
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    float v[kBatch];
    const auto take = [&](auto batch) {
      pieces.read(v, 0, p.x_type, batch);
      pieces.for_each_left_out(1, batch, [&](int j) { v[j] = kMasked; });
    };
    RunningSum running;
    pieces.for_each_piece(false, [&](int) {
      pieces.for_each_batch([&](auto batch) {
        take(batch);
        running.add<batch.kCount>([&](int j) { return v[j]; });
      });
    });
    const float largest = pieces.reduce(running.largest, max_number), base = softmax_base(largest);
    const SoftmaxRow result = softmax_row(largest, pieces.sum(running.relative_to(base)), p.safe);
    pieces.for_each_piece(true, [&](int begin) {
      uint8_t* y = element(p.y, p.y_type, row * p.columns + begin);
      const uint32_t place = pieces.place(y, p.y_type, 0);
      pieces.for_each_batch([&](auto batch) {
        take(batch);
        if (p.statistics) {
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) v[j] = log_softmax_of(result, v[j]);
        } else {
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) v[j] = softmax_of(result, exp_above(v[j], base));
        }
        pieces.write(v, place, y, p.y_type, batch);
      });
      pieces.flush(place, y, bytes_of(p.y_type));
    });
    if (p.statistics && thread_index() == 0) {
      store(p.statistics + row, result.base);
      store(p.statistics + p.rows + row, result.inverse);
    }
  }
  pieces.finish();
}

/// The result (or x), its gradient, and the mask.
struct SoftmaxGradientPieces {
  const SoftmaxRowsBackward& p;
  AK_DEVICE const uint8_t* at(int m, int64_t row) const {
    if (m == 2) return p.mask.row(row);
    return m == 0 ? element(p.of, p.of_type, row * p.columns) : element(p.grad, p.grad_type, row * p.columns);
  }
  AK_DEVICE bool reads(int64_t) const { return true; }
};

template <int kThreads>
AK_KERNEL(kThreads, kPieceThreads / kThreads)
softmax_rows_backward_kernel(AK_PARAM(SoftmaxRowsBackward) p, AK_PARAM(PieceShape) shape) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const bool log = p.statistics != nullptr;
  RowPieces<kThreads, 3, SoftmaxGradientPieces> pieces(
      {bytes_of(p.of_type), bytes_of(p.grad_type), p.mask.data != nullptr}, p.rows, p.columns, shape, {p});
  AK_NO_UNROLL
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const float base = log ? load(p.statistics + row) : 0.0f;
    const float inverse = log ? load(p.statistics + p.rows + row) : 0.0f;
    float y[kBatch], g[kBatch];
    const auto take = [&](auto batch) {
      pieces.read(y, 0, p.of_type, batch);
      pieces.read(g, 1, p.grad_type, batch);
    };
    float sum = 0.0f;
    pieces.for_each_piece(false, [&](int) {
      float of_piece = 0.0f;
      pieces.for_each_batch([&](auto batch) {
        take(batch);
        AK_UNROLL
        for (int j = 0; j < batch.kCount; j++) of_piece = log ? of_piece + g[j] : fma(g[j], y[j], of_piece);
      });
      sum += of_piece;
    });
    sum = pieces.sum(sum);
    pieces.for_each_piece(true, [&](int begin) {
      uint8_t* out = element(p.out, p.out_type, row * p.columns + begin);
      uint32_t place = pieces.place(out, p.out_type, 1);
      if (place == 0) place = pieces.place(out, p.out_type, 0);
      pieces.for_each_batch([&](auto batch) {
        take(batch);
        if (log) {
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++)
            g[j] = log_softmax_gradient(exp_above(y[j], base) * inverse, g[j], sum);
        } else {
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) g[j] = softmax_gradient(y[j], g[j], sum);
        }
        pieces.for_each_left_out(2, batch, [&](int j) { g[j] = 0.0f; });
        pieces.write(g, place, out, p.out_type, batch);
      });
      pieces.flush(place, out, bytes_of(p.out_type));
    });
  }
  pieces.finish();
}

constexpr int kRingWarps = 16;  // an SM: 128 registers a thread

/// The mask of a row, for the threads of a team. Its bytes are loaded a row ahead.
template <class Team>
class RowKept {
 public:
  AK_DEVICE RowKept(const RowMask& mask, int64_t rows, int columns) : mask_(mask), rows_(rows), columns_(columns) {}

  AK_DEVICE void load_ahead(int64_t row) {
    if (mask_.data == nullptr || row >= rows_) return;
    const uint8_t* at = mask_.row(row);
    for_each_held<Team::kThreads, kRingVec, Team::kColumns>(columns_, [&](int held, int column) {
      bytes_[held / kRingVec] = load(reinterpret_cast<const uint32_t*>(at + column));
    });
  }
  /// Calls f(j) for the masked values of the row loaded last.
  template <class F>
  AK_DEVICE void for_each_left_out(F f) const {
    if (mask_.data == nullptr) return;
    AK_UNROLL
    for (int j = 0; j < Team::kColumns; j++) {
      if ((bytes_[j / kRingVec] & 0xffu << j % kRingVec * 8) == 0) f(j);
    }
  }

 private:
  const RowMask& mask_;
  int64_t rows_;
  int columns_;
  uint32_t bytes_[Team::kColumns / kRingVec] = {};  // a vector's four
};

template <class Team>
AK_KERNEL(kWarpThreads* kRingWarps, 1)
softmax_rows_ring_kernel(AK_PARAM(SoftmaxRows) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  const bool log = p.statistics != nullptr;
  RowRing<Team, 1> ring({{p.x, p.x_type, p.columns}}, p.rows, p.columns, teams);
  RowKept<Team> kept(p.mask, p.rows, p.columns);
  kept.load_ahead(ring.first());
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    float v[kColumns];
    ring.wait();
    ring.read(v, 0, kMasked);
    ring.refill(row);
    kept.for_each_left_out([&](int j) { v[j] = kMasked; });
    kept.load_ahead(row + ring.step());
    float largest[1] = {kMasked}, sum[1] = {};
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) largest[0] = max_number(v[j], largest[0]);
    ring.reduce(largest, max_number);
    const float base = softmax_base(largest[0]);
    if (log) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) sum[0] += exp_above(v[j], base);
    } else {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) {
        v[j] = exp_above(v[j], base);
        sum[0] += v[j];
      }
    }
    ring.sum(sum);
    const SoftmaxRow result = softmax_row(largest[0], sum[0], p.safe);
    if (log) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) v[j] = log_softmax_of(result, v[j]);
    } else {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) v[j] = softmax_of(result, v[j]);
    }
    store_row<kThreads, kRingVec>(v, p.y, p.y_type, row * p.columns, p.columns);
    if (log && ring.leads()) {
      store(p.statistics + row, result.base);
      store(p.statistics + p.rows + row, result.inverse);
    }
  }
  ring.finish();
}

template <class Team>
AK_KERNEL(kWarpThreads* kRingWarps, 1)
softmax_rows_backward_ring_kernel(AK_PARAM(SoftmaxRowsBackward) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  const bool log = p.statistics != nullptr;
  RowRing<Team, 2> ring({{p.of, p.of_type, p.columns}, {p.grad, p.grad_type, p.columns}}, p.rows, p.columns, teams);
  RowKept<Team> kept(p.mask, p.rows, p.columns);
  float next_base = 0.0f, next_inverse = 0.0f;  // of the next row, loaded a row ahead
  const auto load_statistics = [&](int64_t row) {
    if (!log || row >= p.rows) return;
    next_base = load(p.statistics + row);
    next_inverse = load(p.statistics + p.rows + row);
  };
  load_statistics(ring.first());
  kept.load_ahead(ring.first());
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const float base = next_base, inverse = next_inverse;
    load_statistics(row + ring.step());
    float y[kColumns], g[kColumns];  // lanes beyond the row have g = 0
    ring.wait();
    ring.read(y, 0);
    ring.read(g, 1);
    ring.refill(row);
    float sum[1] = {};
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) sum[0] = log ? sum[0] + g[j] : fma(g[j], y[j], sum[0]);
    ring.sum(sum);
    if (log) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) g[j] = log_softmax_gradient(exp_above(y[j], base) * inverse, g[j], sum[0]);
    } else {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) g[j] = softmax_gradient(y[j], g[j], sum[0]);
    }
    kept.for_each_left_out([&](int j) { g[j] = 0.0f; });
    kept.load_ahead(row + ring.step());
    store_row<kThreads, kRingVec>(g, p.out, p.out_type, row * p.columns, p.columns);
  }
  ring.finish();
}

/// True if a ring can read the rows, and those of the mask, in vectors.
bool ring_takes(const RowMask& mask, int columns, bool aligned) {
  return aligned && columns <= kRingColumns && (mask.data == nullptr || mask.wide);
}

}  // namespace

Status softmax_rows(const SoftmaxRows& p, Stream stream) {
  if (p.rows == 0) return {};
  const bool aligned = rows_aligned(p.x, p.columns) && rows_aligned(p.y, p.columns);
  if (ring_takes(p.mask, p.columns, aligned)) {
    int64_t blocks = 0;
    const Status status = with_row_team<RowTeam<8, 32>>(p.columns, [&]<class Team>(Team) {
      return launch_ring<Team, 1>("softmax_rows", softmax_rows_ring_kernel<Team>, p, {{p.x, p.x_type, p.columns}},
                                  p.columns, kRingWarps / Team::kWarps, stream, &blocks);
    });
    if (blocks > 0) return status;
  }
  return launch_pieces("softmax_rows", {bytes_of(p.x_type), p.mask.data != nullptr}, p.columns, p, stream,
                       [](auto threads) { return softmax_rows_kernel<threads()>; });
}

Status softmax_rows_backward(const SoftmaxRowsBackward& p, Stream stream) {
  if (p.rows == 0) return {};
  const bool aligned =
      rows_aligned(p.grad, p.columns) && rows_aligned(p.of, p.columns) && rows_aligned(p.out, p.columns);
  if (ring_takes(p.mask, p.columns, aligned)) {
    int64_t blocks = 0;
    const Status status = with_row_team<RowTeam<8, 32>>(p.columns, [&]<class Team>(Team) {
      return launch_ring<Team, 2>("softmax_rows_backward", softmax_rows_backward_ring_kernel<Team>, p,
                                  {{p.of, p.of_type, p.columns}, {p.grad, p.grad_type, p.columns}}, p.columns,
                                  kRingWarps / Team::kWarps, stream, &blocks);
    });
    if (blocks > 0) return status;
  }
  return launch_pieces("softmax_rows_backward", {bytes_of(p.of_type), bytes_of(p.grad_type), p.mask.data != nullptr},
                       p.columns, p, stream, [](auto threads) { return softmax_rows_backward_kernel<threads()>; });
}

}  // namespace ak
