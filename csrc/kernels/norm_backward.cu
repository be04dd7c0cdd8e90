// norm_backward: the gradient of the rows, and of weight and bias as sums over the rows.
//
// Work: reads grad and x, writes as much as x: 6 bytes an element in 16 bits, and some 25 instructions, so memory
// bandwidth is the limit. Plan: a persistent grid; a block takes every grid-th row, holds it in registers, 16 columns a
// thread, between the sums over the row and the result, and keeps its sums over rows in registers until the end. Then
// it stores them in a slot of its own, and a second kernel adds the slots: 8 bytes a column and block, written and
// read, 2 % of the traffic from 20,000 rows on. Rows beyond 8,192 columns are walked in pieces, read a second time from
// L2, where the block's slot stays, too.
//
// Traps: no atomics, whose order would change the bits from run to run. A block without a row has no slot: the grid is
// never larger than the number of rows.
#include "kernels/norm_backward.h"

#include <algorithm>

#include "device/launch.cuh"
#include "kernels/gemm_column_sums.h"
#include "kernels/norm_row.cuh"
#include "math/layer_norm.h"

namespace ak {
namespace {

template <int kThreads, int kVec, bool kWhole>
AK_KERNEL(kThreads, 512 / kThreads)
norm_backward_kernel(AK_PARAM(NormBackward) p) {
  constexpr int kPiece = kThreads * kHeld;
  const float count = static_cast<float>(p.columns);
  float* slot = p.slots + static_cast<int64_t>(block_index()) * p.parameters * p.columns;
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
    // Sums over rows of a piece from the block's slot, and back.
    const auto load_slot = [&](RowValues& sums, int parameter, int begin) {
      if (p.parameters <= parameter) return;
      const int64_t place = static_cast<int64_t>(parameter) * p.columns + begin;
      load_row<kThreads, kVec>(sums, slot, DType::kFloat32, place, p.columns - begin);
    };
    const auto store_slot = [&](RowValues& sums, int parameter, int begin) {
      if (p.parameters <= parameter) return;
      const int64_t place = static_cast<int64_t>(parameter) * p.columns + begin;
      store_row<kThreads, kVec>(sums, slot, DType::kFloat32, place, p.columns - begin);
    };

    float sum_g = 0.0f, sum_gn = 0.0f;
    AK_NO_UNROLL
    for (int begin = 0; begin < p.columns; begin += kPiece) {
      take(begin);
      if constexpr (!kWhole) {
        if (row != block_index()) {
          load_slot(of_weight, 0, begin);
          load_slot(of_bias, 1, begin);
        } else {
          AK_UNROLL
          for (int j = 0; j < kHeld; j++) of_weight[j] = of_bias[j] = 0.0f;
        }
      }
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) {
        of_weight[j] = fma(g[j], n[j], of_weight[j]);
        of_bias[j] += g[j];
      }
      if constexpr (!kWhole) {
        store_slot(of_weight, 0, begin);
        store_slot(of_bias, 1, begin);
      }
      weigh(begin);
      AK_UNROLL
      for (int j = 0; j < kHeld; j++) {
        sum_g += g[j];
        sum_gn = fma(g[j], n[j], sum_gn);
      }
    }
    const float mean_g = p.mean == nullptr ? 0.0f : div(block_sum<kThreads>(sum_g), count);
    const float mean_gn = div(block_sum<kThreads>(sum_gn), count);

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
    }
  }
  if constexpr (kWhole) {
    if (p.parameters > 0) store_row<kThreads, kVec>(of_weight, slot, DType::kFloat32, 0, p.columns);
    if (p.parameters > 1) store_row<kThreads, kVec>(of_bias, slot, DType::kFloat32, p.columns, p.columns);
  }
}

/// As many as run at once, for the widest that a row of `columns` may need.
int64_t norm_backward_blocks(int64_t rows, int columns) {
  const int per_sm = columns <= 32 * kHeld ? 16 : columns <= 128 * kHeld ? 4 : 1;
  return std::min<int64_t>(rows, static_cast<int64_t>(per_sm) * device_sm_count());
}

}  // namespace

int64_t norm_backward_slots_size(int64_t rows, int columns, int parameters) {
  return norm_backward_blocks(rows, columns) * columns * parameters;
}

Status norm_backward(const NormBackward& p, Stream stream) {
  if (p.rows == 0) return {};
  const int64_t blocks = norm_backward_blocks(p.rows, p.columns);
  bool aligned = true;  // an absent tensor is
  for (const void* data :
       {p.grad, p.x, p.weight, p.grad_sum, static_cast<const void*>(p.out), static_cast<const void*>(p.slots)})
    aligned = aligned && rows_aligned(data, p.columns);
  const Status status = with_row_shape(p.columns, aligned, [&]<int kThreads, int kVec, bool kWhole>() {
    const LaunchConfig config{
        .name = "norm_backward", .grid = static_cast<int>(blocks), .block = kThreads, .stream = stream};
    return launch(norm_backward_kernel<kThreads, kVec, kWhole>, config, p);
  });
  if (!status.ok() || p.parameters == 0) return status;
  return column_sums(p.slots, blocks, p.parameters * static_cast<int64_t>(p.columns), p.sums, stream);
}

}  // namespace ak
