// norm_forward: y = (s - mean) * rstd * weight + bias of the rows of s = x or s = x + residual.
//
// Work: reads x (and residual), writes y (and s): 4 bytes and some 10 instructions an element in 16 bits, so memory
// bandwidth is the limit.
//
// Plan. A persistent grid, and a path by the length of the rows:
// - Up to 8,192 columns (ring): a warp a row up to 1,024 columns, 4 or 16 warps beyond. The row stays in registers
//   through the passes for mean, mean square and result; weight and bias stay there for all rows. cp.async prefetches
//   the next rows, at least one a team: 48 to 72 KB an SM for rows of 768 16-bit columns, where 4.25 TB/s of reads and
//   writes need some 13 KB of reads in flight (800 ns of latency).
// - Up to 16,384 (long ring): 16 warps share a row, whose slot is refilled as soon as the row is in registers. Weight
//   and bias come from L2 for every row.
// - Beyond (resident): the row stays in its slot of shared memory through the passes; the sum replaces the residual.
//   Two rows of 32,768 16-bit columns (64 KB each) share an SM, each with 16 warps, so one is prefetched while the
//   other is in work; without a residual the last pass issues the copies of the next row after its own reads. In fp32
//   two rows of up to 29,000 columns fit.
// - One row fits (wide ring): up to 32,768 columns its 128 KB move to the registers of 16 warps, 64 columns a thread,
//   so that the next 128 KB are in flight through all passes. For longer rows reads pause during the first two passes.
// - The last kernel takes unaligned rows, longer rows, rows that do not fit a chip's shared memory, and long rows whose
//   weight and bias have different types: a block takes a row, 16 columns a thread. Beyond 8,192 columns it walks the
//   row in pieces, which the second and third pass read again from L2, with nothing in flight while the block reduces:
//   40 to 60 % of a copy on an H200, measured at 32,768 columns.
// The dtype of each tensor is selected at run time, by one uniform branch for the columns of a thread or for a pass
// over a long row, so that one kernel serves any mix.
//
// Instructions an element, counted in SASS: 24 in registers; in shared memory 19 in fp32, 20 in fp16, 21 in bf16, 17
// for RMS norm, 5 of them once a row. At a copy's rate that is 49, 39, 81, 83 and 68 % of an SM's issue slots, of which
// one team alone reaches 60 to 70 %. Prediction, not measured, of a model in which 132 SMs share memory: nine tenths of
// a copy, three quarters where reads pause, unless L2 is the limit, which serves 4 more bytes an element for 16-bit
// weight and bias: 6.4 TB/s at a copy's rate.
//
// Traps: lanes beyond the end of a row must not enter the mean square, since their distance from the mean is not 0. The
// rounded sum is normalized, because backward finds that one in memory.
#include "norm/call.h"

#include <algorithm>

#include "base/row_ring.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "norm/formula.h"

namespace ak {
namespace {

struct RowStatistics {
  float mean, rstd;
};

/// The statistics of a row. sum_of(f) folds f over each thread's elements of the row, from 0, and sums over threads.
template <class SumOf>
AK_DEVICE RowStatistics row_statistics(const NormForward& p, SumOf sum_of) {
  const float count = static_cast<float>(p.columns);
  float factor = 1.0f;
  AK_NO_UNROLL
  while (true) {
    float mean = 0.0f;
    if (p.mean != nullptr) mean = div(sum_of([&](float sum, float v) { return fma(v, factor, sum); }), count);
    const float square = div(sum_of([&](float sum, float v) {
                               const float centred = fma(v, factor, -mean);
                               return fma(centred, centred, sum);
                             }),
                             count);
    if (is_finite(square) || factor != 1.0f)
      return {unshrunk_mean(mean, factor), reciprocal_deviation(square, p.eps, factor)};
    factor = kShrink;
  }
}

/// A thread's columns of weight and bias from `begin` on; 1 and 0 without them.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void load_parameters(const NormForward& p, float (&weight)[kColumns], float (&bias)[kColumns], int begin) {
  AK_UNROLL
  for (int j = 0; j < kColumns; j++) weight[j] = 1.0f, bias[j] = 0.0f;
  if (p.weight != nullptr) load_row<kThreads, kVec>(weight, p.weight, p.weight_type, begin, p.columns - begin);
  if (p.bias != nullptr) load_row<kThreads, kVec>(bias, p.bias, p.bias_type, begin, p.columns - begin);
}

AK_DEVICE void store_statistics(const NormForward& p, int64_t row, const RowStatistics& s) {
  if (p.mean != nullptr) store(p.mean + row, s.mean);
  store(p.rstd + row, s.rstd);
}

/// Warps an SM for rows that stay in shared memory.
constexpr int kRowWarps = 2 * ResidentRowTeam::kWarps;

/// Warps an SM. Those of a long row have no registers left for weight and bias.
template <class Team>
constexpr int kResidentWarps = Team::kLong ? Team::kWarps : three_row_warps(Team::kColumns);

template <class Team>
AK_KERNEL(kWarpThreads* kResidentWarps<Team>, 1)
norm_forward_ring_kernel(AK_PARAM(NormForward) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  constexpr int kPart = kColumns > 32 ? kRingVec : 8;  // columns of weight and bias that long rows load at a time
  constexpr bool kAdds = kColumns <= 32;               // with more, no registers are left for the residual
  RowRing<Team, 2> ring({{p.x, p.x_type, p.columns}, {p.residual, p.residual_type, p.columns}}, p.rows, p.columns,
                        teams);
  float weight[kColumns], bias[kColumns];
  if constexpr (!Team::kLong) load_parameters<kThreads, kRingVec>(p, weight, bias, 0);
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const int64_t at = row * p.columns;
    float v[kColumns];
    ring.wait();
    ring.read(v, 0);
    if (kAdds && p.residual != nullptr) {
      ring.add(v, 1);
      store_row<kThreads, kRingVec>(v, p.sum, p.residual_type, at, p.columns);
    }
    ring.refill(row);
    const RowStatistics s = row_statistics(p, [&](auto f) {
      float sum[1] = {};
      for_each_held<kThreads, kRingVec, kColumns>(p.columns, [&](int held, int) {
        AK_UNROLL
        for (int j = 0; j < kRingVec; j++) sum[0] = f(sum[0], v[held + j]);
      });
      ring.sum(sum);
      return sum[0];
    });
    if constexpr (!Team::kLong) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++)
        v[j] = scaled_and_shifted(normalized(v[j], s.mean, s.rstd), weight[j], bias[j]);
    } else {
      AK_UNROLL
      for (int k = 0; k < kColumns; k += kPart) {
        float w[kPart], b[kPart];
        load_parameters<kThreads, kRingVec>(p, w, b, k * kThreads);
        AK_UNROLL
        for (int j = 0; j < kPart; j++) v[k + j] = scaled_and_shifted(normalized(v[k + j], s.mean, s.rstd), w[j], b[j]);
      }
    }
    store_row<kThreads, kRingVec>(v, p.y, p.y_type, at, p.columns);
    if (ring.leads()) store_statistics(p, row, s);
  }
  ring.finish();
}

AK_HD DType parameter_type(const NormForward& p) { return p.weight != nullptr ? p.weight_type : p.bias_type; }

/// The vector of weights or biases from a column on; `value` everywhere without data. It is selected in whole
/// registers, not in halves.
template <class P>
AK_DEVICE Packed<P, kRingVec> parameters(const P* data, int column, float value) {
  Vec<P, kRingVec> all;
  AK_UNROLL
  for (int j = 0; j < kRingVec; j++) all[j] = round_to<P>(value);
  Packed<P, kRingVec> words = packed(all);
  if (data != nullptr) words = packed(load_vec<kRingVec>(data + column));
  return words;
}

/// Computes x + residual of a row in its slot: it replaces the residual there and goes to memory.
template <class Ring>
AK_DEVICE void add_residual(const NormForward& p, const Ring& ring, int64_t at) {
  constexpr int kReads = 2;  // vectors in flight a thread
  with_row_dtype(p.x_type, [&]<class X>(X) {
    with_row_dtype(p.residual_type, [&]<class R>(R) {
      R* sum = static_cast<R*>(p.sum) + at;
      ring.template for_each_vectors<kReads>([&]<int kVectors>(int column) {
        AK_UNROLL
        for (int k = 0; k < kVectors; k++) {
          const int first = column + k * Ring::kStep;
          const auto v = ring.template vector<X>(0, first), added = ring.template vector<R>(1, first);
          Vec<R, kRingVec> result;
          AK_UNROLL
          for (int j = 0; j < kRingVec; j++) result[j] = round_to<R>(v[j] + added[j]);
          store_vec(sum + first, result);
          ring.template replace<R>(1, first, result);
        }
      });
    });
  });
}

/// The last pass over a row of type T, with weights and biases of type P, to results of type Y.
template <class T, class P, class Y, bool kRefills, class Ring>
AK_DEVICE void normalize_row(const NormForward& p, const Ring& ring, int matrix, int64_t row, const RowStatistics& s) {
  constexpr int kLoads = 8 / sizeof(P);  // vectors of weights in flight a thread
  const P *weights = static_cast<const P*>(p.weight), *biases = static_cast<const P*>(p.bias);
  Y* y = static_cast<Y*>(p.y) + row * p.columns;
  const T* next = kRefills ? ring.template next_row<T>(row, matrix) : nullptr;
  ring.template for_each_vectors<kLoads>(
      [&]<int kVectors>(int column) {
        Packed<P, kRingVec> weight[kVectors], bias[kVectors];
        AK_UNROLL
        for (int k = 0; k < kVectors; k++) {
          weight[k] = parameters(weights, column + k * Ring::kStep, 1.0f);
          bias[k] = parameters(biases, column + k * Ring::kStep, 0.0f);
        }
        AK_UNROLL
        for (int k = 0; k < kVectors; k++) {
          const auto v = ring.template vector<T>(matrix, column + k * Ring::kStep);
          const auto w = unpacked<P>(weight[k]), b = unpacked<P>(bias[k]);
          Vec<Y, kRingVec> result;
          AK_UNROLL
          for (int j = 0; j < kRingVec; j++)
            result[j] = round_to<Y>(scaled_and_shifted(normalized(v[j], s.mean, s.rstd), w[j], b[j]));
          store_vec(y + column + k * Ring::kStep, result);
        }
      },
      [&]<int kVectors>(int begin) {
        if constexpr (kRefills) ring.template refill_vectors<kVectors>(next, matrix, begin);
      });
}

/// Rows that do not fit registers stay in their slots through the passes. Each pass is compiled for the types that it
/// touches; weight and bias have one type. Without a residual the last pass issues the copies of the next row, each
/// into the slot bytes that it has just read.
template <bool kAdds>
AK_KERNEL(kWarpThreads* kRowWarps, 1)
norm_forward_resident_kernel(AK_PARAM(NormForward) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kSum = kAdds ? 1 : 0;  // the sum replaces the residual
  constexpr int kReads = 8;            // vectors in flight a thread, from shared memory
  RowRing<ResidentRowTeam, 2> ring({{p.x, p.x_type, p.columns}, {p.residual, p.residual_type, p.columns}}, p.rows,
                                   p.columns, teams);
  const DType row_type = kAdds ? p.residual_type : p.x_type;
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    ring.wait();
    if constexpr (kAdds) add_residual(p, ring, row * p.columns);
    const RowStatistics s = row_statistics(p, [&](auto f) {
      float sum[1] = {};
      with_row_dtype(row_type, [&]<class T>(T) {
        ring.template for_each_vectors<kReads>([&]<int kVectors>(int column) {
          AK_UNROLL
          for (int k = 0; k < kVectors; k++) {
            const auto v = ring.template vector<T>(kSum, column + k * ring.kStep);
            AK_UNROLL
            for (int j = 0; j < kRingVec; j++) sum[0] = f(sum[0], v[j]);
          }
        });
      });
      ring.sum(sum);
      return sum[0];
    });
    with_row_dtype(row_type, [&]<class T>(T) {
      with_row_dtype(parameter_type(p), [&]<class P>(P) {
        with_row_dtype(p.y_type, [&]<class Y>(Y) { normalize_row<T, P, Y, !kAdds>(p, ring, kSum, row, s); });
      });
    });
    if constexpr (kAdds) {
      ring.refill(row);
    } else {
      ring.refilled();
    }
    if (ring.leads()) store_statistics(p, row, s);
  }
  ring.finish();
}

/// Threads an SM: vectors leave registers for more of them.
constexpr int pieces_threads(int vec) { return vec == 1 ? 512 : 768; }

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, pieces_threads(kVec) / kThreads)
norm_forward_kernel(AK_PARAM(NormForward) p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kPiece = kThreads * kHeld;
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const int64_t at = row * p.columns;
    RowValues v;
    const auto take_sum = [&](int begin) {
      const int left = p.columns - begin;
      load_row<kThreads, kVec>(v, p.x, p.x_type, at + begin, left);
      if (p.residual == nullptr) return;
      RowValues added;
      load_row<kThreads, kVec>(added, p.residual, p.residual_type, at + begin, left);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) v[j] += added[j];
      store_row<kThreads, kVec>(v, p.sum, p.residual_type, at + begin, left);
    };
    // Calls f(first column) with each piece of the row in v.
    const auto for_each_piece = [&](auto f) {
      if constexpr (kWhole) {
        f(0);
      } else {
        AK_NO_UNROLL
        for (int begin = 0; begin < p.columns; begin += kPiece) {
          const bool summed = p.residual != nullptr;  // then a thread reads back its own writes
          load_row<kThreads, kVec>(v, summed ? p.sum : p.x, summed ? p.residual_type : p.x_type, at + begin,
                                   p.columns - begin);
          f(begin);
        }
      }
    };
    if constexpr (kWhole) {
      take_sum(0);
    } else if (p.residual != nullptr) {
      AK_NO_UNROLL
      for (int begin = 0; begin < p.columns; begin += kPiece) take_sum(begin);
    }

    const RowStatistics s = row_statistics(p, [&](auto f) {
      SumOfPieces<kWhole> sum = 0;
      for_each_piece([&](int begin) {
        float of_piece = 0.0f;
        for_each_held<kThreads, kVec>(p.columns - begin, [&](int held, int) {
          AK_UNROLL
          for (int j = 0; j < kVec; j++) of_piece = f(of_piece, v[held + j]);
        });
        sum += of_piece;
      });
      return block_sum<kThreads>(static_cast<float>(sum));
    });
    for_each_piece([&](int begin) {
      RowValues weight, bias;
      load_parameters<kThreads, kVec>(p, weight, bias, begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) v[j] = scaled_and_shifted(normalized(v[j], s.mean, s.rstd), weight[j], bias[j]);
      store_row<kThreads, kVec>(v, p.y, p.y_type, at + begin, p.columns - begin);
    });
    if (thread_index() == 0) store_statistics(p, row, s);
  }
}

}  // namespace

Status norm_forward(const NormForward& p, Stream stream) {
  if (p.rows == 0) return {};
  bool aligned = true;  // absent tensors count as aligned
  for (const void* data :
       {p.x, p.residual, p.weight, p.bias, static_cast<const void*>(p.sum), static_cast<const void*>(p.y)})
    aligned = aligned && rows_aligned(data, p.columns);
  const bool one_parameter_type = p.weight == nullptr || p.bias == nullptr || p.weight_type == p.bias_type;
  if (aligned && p.columns <= (one_parameter_type ? kResidentColumns : kLongRingColumns)) {
    int64_t blocks = 0;
    const RingMatrix rows[] = {{p.x, p.x_type, p.columns}, {p.residual, p.residual_type, p.columns}};
    const auto run = [&]<class Team>(Team, auto kernel, int warps) {
      return launch_ring<Team, 2>("norm_forward", kernel, p, rows, p.columns, warps / Team::kWarps, stream, &blocks);
    };
    const auto on_ring = [&]<class Team>(Team team) {
      return run(team, norm_forward_ring_kernel<Team>, kResidentWarps<Team>);
    };
    // Two rows fit shared memory: else the next one could only come after the current one.
    const bool two_stay = ring_teams<ResidentRowTeam>(rows, int64_t{1} << 40, p.columns, 2) == 2;
    const Status status =
        p.columns <= kRingColumns       ? with_row_team<RowTeam<16, 16>>(p.columns, on_ring)
        : p.columns <= kLongRingColumns ? on_ring(LongRowTeam{})
        : p.columns <= kWideRingColumns && !two_stay && p.residual == nullptr
            ? on_ring(WideRowTeam{})
            : run(ResidentRowTeam{},
                  p.residual == nullptr ? norm_forward_resident_kernel<false> : norm_forward_resident_kernel<true>,
                  kRowWarps);
    if (blocks > 0) return status;
  }
  return with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    const LaunchConfig config{.name = "norm_forward",
                              .grid = static_cast<int>(std::min<int64_t>(p.rows, 1 << 30)),
                              .block = kThreads,
                              .overlap_previous = true,
                              .stream = stream};
    return launch(norm_forward_kernel<kThreads, kVec, kWhole>, config, p);
  });
}

}  // namespace ak
