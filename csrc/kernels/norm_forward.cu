// norm_forward: y = (s - mean) * rstd * weight + bias of the rows of s = x + residual.
//
// Work: reads x (and residual), writes y (and s): 4 bytes an element in 16 bits, and some 10 instructions, so memory
// bandwidth is the limit. Plan: a block takes a row at a time and keeps it in registers, 16 columns a thread, through
// the passes for the mean, for the mean square and for the result; at least 512 threads an SM with 32 to 64 bytes each
// on their way. Weight and bias come from the caches. Rows beyond 8,192 columns are walked in pieces, and read again
// from L2 in the second and third pass. Which of its dtypes a tensor has is decided at run time, by one uniform branch
// for 16 columns, so that any mix is served by one kernel.
//
// Traps: lanes beyond the end of a row must not enter the mean square, as their distance from the mean is not 0. It is
// the rounded sum that is normalised, which backward will find in memory.
#include "kernels/norm_forward.h"

#include <algorithm>

#include "device/launch.cuh"
#include "kernels/norm_row.cuh"
#include "math/layer_norm.h"

namespace ak {
namespace {

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
norm_forward_kernel(AK_PARAM(NormForward) p) {
  constexpr int kPiece = kThreads * kHeld;
  const float count = static_cast<float>(p.columns);
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

    float mean = 0.0f, rstd = 0.0f, factor = 1.0f;
    AK_NO_UNROLL
    while (true) {
      mean = 0.0f;
      if (p.mean != nullptr) {
        float sum = 0.0f;
        for_each_piece([&](int) {
          AK_UNROLL
          for (int j = 0; j < kHeld; j++) sum = fma(v[j], factor, sum);
        });
        mean = div(block_sum<kThreads>(sum), count);
      }
      float sum = 0.0f;
      for_each_piece([&](int begin) {
        for_each_held<kThreads, kVec>(p.columns - begin, [&](int held, int) {
          AK_UNROLL
          for (int j = 0; j < kVec; j++) {
            const float centred = fma(v[held + j], factor, -mean);
            sum = fma(centred, centred, sum);
          }
        });
      });
      const float square = div(block_sum<kThreads>(sum), count);
      if (is_finite(square) || factor != 1.0f) {
        rstd = reciprocal_deviation(square, p.eps, factor);
        mean = unshrunk_mean(mean, factor);
        break;
      }
      factor = kShrink;
    }

    for_each_piece([&](int begin) {
      const int left = p.columns - begin;
      RowValues weight, bias;
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) weight[j] = 1.0f, bias[j] = 0.0f;
      if (p.weight != nullptr) load_row<kThreads, kVec>(weight, p.weight, p.weight_type, begin, left);
      if (p.bias != nullptr) load_row<kThreads, kVec>(bias, p.bias, p.bias_type, begin, left);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) v[j] = scaled_and_shifted(normalized(v[j], mean, rstd), weight[j], bias[j]);
      store_row<kThreads, kVec>(v, p.y, p.y_type, at + begin, left);
    });
    if (thread_index() == 0) {
      if (p.mean != nullptr) store(p.mean + row, mean);
      store(p.rstd + row, rstd);
    }
  }
}

}  // namespace

Status norm_forward(const NormForward& p, Stream stream) {
  if (p.rows == 0) return {};
  bool aligned = true;  // an absent tensor is
  for (const void* data :
       {p.x, p.residual, p.weight, p.bias, static_cast<const void*>(p.sum), static_cast<const void*>(p.y)})
    aligned = aligned && rows_aligned(data, p.columns);
  return with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    const LaunchConfig config{.name = "norm_forward",
                              .grid = static_cast<int>(std::min<int64_t>(p.rows, 1 << 30)),
                              .block = kThreads,
                              .stream = stream};
    return launch(norm_forward_kernel<kThreads, kVec, kWhole>, config, p);
  });
}

}  // namespace ak
