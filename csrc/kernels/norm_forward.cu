// norm_forward: y = (s - mean) * rstd * weight + bias of the rows of s = x + residual, or dropout(x) + residual.
//
// Work: reads x (and residual), writes y (and s): 4 bytes an element in 16 bits, and some 10 instructions, so memory
// bandwidth is the limit. Plan: a persistent grid, and a warp a row up to 1,024 columns, 4 or 16 warps up to 8,192. The
// row is in registers through the passes for the mean, for the mean square and for the result, as are weight and bias
// for good, while cp.async brings the next rows: 1 row a team or more is always on its way, 48 to 72 KB an SM of rows
// of 768 16-bit columns, where 4.25 TB/s of reads and writes need some 13 KB of reads (800 ns of latency). From 8,193
// to 16,384 columns 16 warps share a row, whose slot is free for the next one as soon as it is in registers; weight and
// bias come from L2 for every row. A longer row stays in its slot through the passes, as does the sum in the place of
// the residual. Of 32,768 columns of 16 bits two rows of 64 KB share an SM, each with 16 warps: one is on its way while
// the other is worked on. Of fp32 there is room for one, 128 KB: an SM's reads rest while it works, but each SM by
// itself, so that 132 of them have more than the 40 KB on the way, on average, which memory needs. An element takes 18
// instructions in fp32, 19 in fp16 and 24 in bf16 (11 to 15 in the last pass): at a copy's rate 36, 77 and 95 % of what
// an SM issues. Prediction, not measured: 90 % of a copy in fp32, 75 in fp16 and 65 in bf16, whose limit is then that.
// Rows that are not aligned, or longer, or do not fit a chip's shared memory, take the last kernel: a block takes a
// row, 16 columns a thread, and beyond 8,192 columns walks it in pieces, read again from L2 in the second and third
// pass, with nothing on its way while the block adds up: 40 to 60 % of a copy on an H200, measured at 32,768 columns.
// Which of its dtypes a tensor has is decided at run time, by one uniform branch for the columns of a thread, so that
// any mix is served by one kernel.
//
// Dropout is a uniform branch behind the read of x, the generator's 4 words in the place of a vector: 26 instructions
// an element more, and no byte on its way less. Where rows are not aligned a call makes one word.
//
// Traps: lanes beyond the end of a row must not enter the mean square, as their distance from the mean is not 0. It is
// the rounded sum that is normalised, which backward will find in memory.
#include "kernels/norm_forward.h"

#include <algorithm>

#include "device/launch.cuh"
#include "kernels/norm_row.cuh"
#include "kernels/row_ring.cuh"
#include "math/layer_norm.h"

namespace ak {
namespace {

struct RowStatistics {
  float mean, rstd;
};

/// Of a row, where sum_of(f) is the sum over all threads of f(.. f(f(0, v), v') ..) over a thread's elements of the
/// row.
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

/// The columns of the part of weight and bias; 1 and 0 where there are none.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void load_parameters(const NormForward& p, float (&weight)[kColumns], float (&bias)[kColumns], RowPart part) {
  AK_UNROLL
  for (int j = 0; j < kColumns; j++) weight[j] = 1.0f, bias[j] = 0.0f;
  if (p.weight != nullptr) load_row<kThreads, kVec>(weight, p.weight, p.weight_type, part.begin, part.left);
  if (p.bias != nullptr) load_row<kThreads, kVec>(bias, p.bias, p.bias_type, part.begin, part.left);
}
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void load_parameters(const NormForward& p, float (&weight)[kColumns], float (&bias)[kColumns], int begin) {
  load_parameters<kThreads, kVec>(p, weight, bias, RowPart{begin, p.columns - begin});
}

AK_DEVICE void store_statistics(const NormForward& p, int64_t row, const RowStatistics& s) {
  if (p.mean != nullptr) store(p.mean + row, s.mean);
  store(p.rstd + row, s.rstd);
}

/// Warps of an SM for rows that stay in shared memory.
constexpr int kRowWarps = 2 * ResidentRowTeam::kWarps;

/// Warps of an SM; the registers of a long row's have no room for weight and bias.
template <class Team>
constexpr int kResidentWarps = Team::kLong ? Team::kWarps : three_row_warps(Team::kColumns);

template <class Team>
AK_KERNEL(kWarpThreads* kResidentWarps<Team>, 1)
norm_forward_ring_kernel(AK_PARAM(NormForward) p, int teams) {
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  constexpr int kPart = 8;  // columns of which long rows load weight and bias at a time
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
    if (p.residual != nullptr) {
      drop_row<kThreads, kRingVec>(v, p.mask, at, p.columns);
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

/// Rows that registers do not hold: they stay in their slots through the passes, and a thread walks what it has of a
/// row part by part.
template <bool kAdds>
AK_KERNEL(kWarpThreads* kRowWarps, 1)
norm_forward_resident_kernel(AK_PARAM(NormForward) p, int teams) {
  constexpr int kThreads = ResidentRowTeam::kThreads;
  constexpr int kSum = kAdds ? 1 : 0;  // the sum takes the place of the residual
  RowRing<ResidentRowTeam, 2> ring({{p.x, p.x_type, p.columns}, {p.residual, p.residual_type, p.columns}}, p.rows,
                                   p.columns, teams);
  // Calls f(part) for parts with kColumns columns of each thread; that a part is whole is known where it is compiled.
  const auto for_each_part = [&]<int kColumns>(auto f) {
    constexpr int kWhole = kColumns * kThreads;
    const int whole = p.columns / kWhole;
    AK_NO_UNROLL
    for (int i = 0; i < whole; i++) f(RowPart{opaque(i * kWhole), kWhole});  // else nvcc splits the stores
    if (whole * kWhole < p.columns) f(RowPart{whole * kWhole, p.columns - whole * kWhole});
  };
  constexpr int kHeldPart = 8, kSumPart = 32;  // of the second a thread keeps nothing
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const int64_t at = row * p.columns;
    ring.wait();
    if constexpr (kAdds) {
      for_each_part.template operator()<kHeldPart>([&](RowPart part) {
        float v[kHeldPart];
        ring.read(v, 0, part);
        drop_row<kThreads, kRingVec>(v, p.mask, at + part.begin, part.left);
        ring.add(v, kSum, part);
        store_row<kThreads, kRingVec>(v, p.sum, p.residual_type, at + part.begin, part.left);
        ring.replace(v, kSum, part);
      });
    }
    const RowStatistics s = row_statistics(p, [&](auto f) {
      float sum[1] = {};
      for_each_part.template operator()<kSumPart>([&](RowPart part) {
        ring.template visit<kSumPart>(kSum, part, [&](int, float v) { sum[0] = f(sum[0], v); });
      });
      ring.sum(sum);
      return sum[0];
    });
    for_each_part.template operator()<kHeldPart>([&](RowPart part) {
      float v[kHeldPart], weight[kHeldPart], bias[kHeldPart];
      load_parameters<kThreads, kRingVec>(p, weight, bias, part);
      ring.read(v, kSum, part);
      AK_UNROLL
      for (int j = 0; j < kHeldPart; j++)
        v[j] = scaled_and_shifted(normalized(v[j], s.mean, s.rstd), weight[j], bias[j]);
      store_row<kThreads, kRingVec>(v, p.y, p.y_type, at + part.begin, part.left);
    });
    ring.refill(row);
    if (ring.leads()) store_statistics(p, row, s);
  }
  ring.finish();
}

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
norm_forward_kernel(AK_PARAM(NormForward) p) {
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
      drop_row<kThreads, kVec>(v, p.mask, at + begin, left);
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
          const bool summed = p.residual != nullptr;  // then the thread reads what it has written
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
      float sum = 0.0f;
      for_each_piece([&](int begin) {
        for_each_held<kThreads, kVec>(p.columns - begin, [&](int held, int) {
          AK_UNROLL
          for (int j = 0; j < kVec; j++) sum = f(sum, v[held + j]);
        });
      });
      return block_sum<kThreads>(sum);
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
  bool aligned = true;  // an absent tensor is
  for (const void* data :
       {p.x, p.residual, p.weight, p.bias, static_cast<const void*>(p.sum), static_cast<const void*>(p.y)})
    aligned = aligned && rows_aligned(data, p.columns);
  if (aligned && p.columns <= kResidentColumns) {
    int64_t blocks = 0;
    const auto run = [&]<class Team>(Team, auto kernel, int warps) {
      return launch_ring<Team, 2>("norm_forward", kernel, p,
                                  {{p.x, p.x_type, p.columns}, {p.residual, p.residual_type, p.columns}}, p.columns,
                                  warps / Team::kWarps, stream, &blocks);
    };
    const auto on_ring = [&]<class Team>(Team team) {
      return run(team, norm_forward_ring_kernel<Team>, kResidentWarps<Team>);
    };
    const Status status =
        p.columns <= kRingColumns ? with_row_team<RowTeam<16, 16>>(p.columns, on_ring)
        : p.columns <= kLongRingColumns
            ? on_ring(LongRowTeam{})
            : run(ResidentRowTeam{},
                  p.residual == nullptr ? norm_forward_resident_kernel<false> : norm_forward_resident_kernel<true>,
                  kRowWarps);
    if (blocks > 0) return status;
  }
  return with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    const LaunchConfig config{.name = "norm_forward",
                              .grid = static_cast<int>(std::min<int64_t>(p.rows, 1 << 30)),
                              .block = kThreads,
                              .stream = stream};
    return launch(norm_forward_kernel<kThreads, kVec, kWhole>, config, p);
  });
}

}  // namespace ak
