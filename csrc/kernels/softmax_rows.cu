// softmax_rows and softmax_rows_backward: softmax and log-softmax of rows, and their gradients.
//
// Work: forward reads x (and a byte of mask) and writes y, backward reads two matrices and writes one: 4 to 6 bytes an
// element in 16 bits, an exponential of the special function unit and some 10 instructions, so memory bandwidth is the
// limit. Plan: norm_forward's. A block keeps a row in registers, 16 columns a thread, through the passes for the
// largest value, for the sum and for the result. Rows beyond 8,192 columns are walked in pieces, twice: every thread
// keeps the largest value of its share and the sum relative to it (Milakov and Gimelshein, arXiv:1805.02867).
//
// Traps: lanes beyond the row must be -inf, not 0. A thread that has seen only -inf must not compute -inf - (-inf). The
// largest value of a row with NaN may be -inf, which does not make the row an empty one: its sum says that.
#include "kernels/softmax_rows.h"

#include <algorithm>

#include "device/approx.cuh"
#include "device/launch.cuh"
#include "kernels/norm_row.cuh"
#include "math/softmax.h"

namespace ak {
namespace {

AK_DEVICE float exp_of(float x) { return exp2_approx(x * 1.4426950408889634f); }

/// Calls f(j) for the values that lie outside of the row, or that the mask leaves out.
template <int kThreads, int kVec, class F>
AK_DEVICE void for_each_left_out(const RowMask& mask, int64_t row, int begin, int left, F f) {
  AK_UNROLL
  for (int k = 0; k < kHeld / kVec; k++) {
    const int column = (k * kThreads + thread_index()) * kVec;
    Vec<uint8_t, kVec> counts;
    AK_UNROLL
    for (int j = 0; j < kVec; j++) counts[j] = column < left;
    if (mask.data != nullptr && column < left) {
      const uint8_t* at = mask.row(row) + begin + column;
      if (kVec > 1 && mask.wide) {
        counts = load_vec<kVec>(at);
      } else {
        AK_UNROLL
        for (int j = 0; j < kVec; j++) counts[j] = load(at + j);
      }
    }
    AK_UNROLL
    for (int j = 0; j < kVec; j++) {
      if (counts[j] == 0) f(k * kVec + j);
    }
  }
}

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
softmax_rows_kernel(AK_PARAM(SoftmaxRows) p) {
  constexpr int kPiece = kThreads * kHeld;
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const int64_t at = row * p.columns;
    RowValues v;
    float largest = kMasked, sum = 0.0f;
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      load_row<kThreads, kVec>(v, p.x, p.x_type, at + begin, p.columns - begin);
      for_each_left_out<kThreads, kVec>(p.mask, row, begin, p.columns - begin, [&](int j) { v[j] = kMasked; });
      float top = largest;
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) top = larger(v[j], top);
      if constexpr (!kWhole) {
        float added = 0.0f;
        AK_UNROLL
        for (int j = 0; j < kHeld; j++) added += exp_of(v[j] - softmax_base(top));
        sum = fma(sum, exp_of(largest - softmax_base(top)), added);
      }
      largest = top;
    }
    const float of_thread = largest;
    largest = block_reduce<kThreads>(largest, larger);
    const float base = softmax_base(largest);
    if constexpr (kWhole) {
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) sum += exp_of(v[j] - base);
    } else {
      sum *= exp_of(softmax_base(of_thread) - base);
    }
    const SoftmaxRow result = softmax_row(largest, block_sum<kThreads>(sum), p.safe);
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      if constexpr (!kWhole) {
        load_row<kThreads, kVec>(v, p.x, p.x_type, at + begin, p.columns - begin);
        for_each_left_out<kThreads, kVec>(p.mask, row, begin, p.columns - begin, [&](int j) { v[j] = kMasked; });
      }
      AK_UNROLL
      for (int j = 0; j < kHeld; j++)
        v[j] = p.statistics ? log_softmax_of(result, v[j]) : softmax_of(result, exp_of(v[j] - base));
      store_row<kThreads, kVec>(v, p.y, p.y_type, at + begin, p.columns - begin);
    }
    if (p.statistics && thread_index() == 0) {
      store(p.statistics + row, result.base);
      store(p.statistics + p.rows + row, result.inverse);
    }
  }
}

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
softmax_rows_backward_kernel(AK_PARAM(SoftmaxGradient) p) {
  constexpr int kPiece = kThreads * kHeld;
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const int64_t at = row * p.columns;
    const bool log = p.statistics != nullptr;
    const float base = log ? load(p.statistics + row) : 0.0f;
    const float inverse = log ? load(p.statistics + p.rows + row) : 0.0f;
    RowValues y, g;
    const auto take = [&](int begin) {
      load_row<kThreads, kVec>(y, p.of, p.of_type, at + begin, p.columns - begin);
      load_row<kThreads, kVec>(g, p.grad, p.grad_type, at + begin, p.columns - begin);
    };
    float sum = 0.0f;
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      take(begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) sum = log ? sum + g[j] : fma(g[j], y[j], sum);
    }
    sum = block_sum<kThreads>(sum);
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      if constexpr (!kWhole) take(begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) {
        g[j] = log ? log_softmax_gradient(exp_of(y[j] - base) * inverse, g[j], sum) : softmax_gradient(y[j], g[j], sum);
      }
      if (log) {
        for_each_left_out<kThreads, kVec>(p.mask, row, begin, p.columns - begin, [&](int j) { g[j] = 0.0f; });
      }
      store_row<kThreads, kVec>(g, p.out, p.out_type, at + begin, p.columns - begin);
    }
  }
}

LaunchConfig config_for(const char* name, int64_t rows, int threads, Stream stream) {
  return {.name = name, .grid = static_cast<int>(std::min<int64_t>(rows, 1 << 30)), .block = threads, .stream = stream};
}

}  // namespace

Status softmax_rows(const SoftmaxRows& p, Stream stream) {
  if (p.rows == 0) return {};
  const bool aligned = rows_aligned(p.x, p.columns) && rows_aligned(p.y, p.columns);
  return with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    return launch(softmax_rows_kernel<kThreads, kVec, kWhole>, config_for("softmax_rows", p.rows, kThreads, stream), p);
  });
}

Status softmax_rows_backward(const SoftmaxGradient& p, Stream stream) {
  if (p.rows == 0) return {};
  const bool aligned =
      rows_aligned(p.grad, p.columns) && rows_aligned(p.of, p.columns) && rows_aligned(p.out, p.columns);
  return with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    return launch(softmax_rows_backward_kernel<kThreads, kVec, kWhole>,
                  config_for("softmax_rows_backward", p.rows, kThreads, stream), p);
  });
}

}  // namespace ak
