// spread_rows and combine_rows: rows of tokens to the order of their groups, and back.
//
// Work: spread reads a row a token and writes top_k, and with y reads as many more; combine reads top_k and writes one.
// 4 to 6 instructions an element: memory bandwidth is the limit. Plan: a warp a row. In combine it is a piece of 256
// columns of a token's row, so that a few tokens fill the chip; a thread has 4 rows of 16 bytes in flight, and adds
// them in the order of the choices. In spread it is a whole row of the result, since the sum of products with y has one
// order; a thread has 2 pieces of x, and of y, in flight. The warps of a token follow each other, so that x comes from
// memory once.
//
// Trap: the bits of a sum must not depend on the alignment of rows. Unaligned ones are read element by element, by the
// thread that would have read the vector.
#include "routing/call.h"

#include <algorithm>
#include <initializer_list>

#include "base/half.h"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kRouteThreads = 256;
constexpr int kRouteBlocks = 4;   // an SM
constexpr int kRouteColumns = 8;  // of a thread
constexpr int kPieceColumns = kRouteColumns * kWarpThreads;

template <class T>
using Piece = Vec<T, kRouteColumns>;

/// `left`: columns from `from` to the end of the row, at least 1. Vectors are whole.
template <bool kVectors, Cache kCache, class T>
AK_DEVICE Piece<T> load_piece(const T* from, int64_t left) {
  if constexpr (kVectors) {
    return load_vec<kRouteColumns, kCache>(from);
  } else {
    Piece<T> piece{};
    AK_UNROLL
    for (int j = 0; j < kRouteColumns; j++) {
      if (j < left) piece[j] = load<kCache>(from + j);
    }
    return piece;
  }
}

template <bool kVectors, Cache kCache, class T>
AK_DEVICE void store_piece(T* to, const float (&values)[kRouteColumns], int64_t left) {
  Piece<T> piece;
  AK_UNROLL
  for (int j = 0; j < kRouteColumns; j++) piece[j] = round_to<T>(values[j]);
  if constexpr (kVectors) {
    store_vec<kCache>(to, piece);
  } else {
    AK_UNROLL
    for (int j = 0; j < kRouteColumns; j++) {
      if (j < left) store<kCache>(to + j, piece[j]);
    }
  }
}

AK_DEVICE int grid_warp() { return block_index() * (kRouteThreads / kWarpThreads) + warp_index(); }

template <class X, class Out, bool kVectors>
AK_KERNEL(kRouteThreads, kRouteBlocks)
spread_rows_kernel(AK_PARAM(SpreadRows) p) {
  constexpr int kInFlight = 2;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Routes& r = p.routes;
  const int row = grid_warp();
  if (row >= r.rows()) return;
  const int64_t place = load(r.places + row);
  const bool exists = place >= 0 && place < r.rows();
  const float weight = r.weights != nullptr ? load(r.weights + row) : 1.0f;
  const X* x = static_cast<const X*>(p.x) + int64_t{row / r.top_k} * r.columns;
  const Out* y = static_cast<const Out*>(p.y) + place * r.columns;
  Out* out = static_cast<Out*>(p.out) + place * r.columns;
  float dot = 0.0f;
  AK_NO_UNROLL
  for (int64_t first = lane_index() * kRouteColumns; exists && first < r.columns; first += kInFlight * kPieceColumns) {
    Piece<X> of_x[kInFlight] = {};
    Piece<Out> of_y[kInFlight] = {};
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int64_t column = first + i * kPieceColumns, left = r.columns - column;
      if (left <= 0) continue;
      of_x[i] = load_piece<kVectors, Cache::kDefault>(x + column, left);
      if (p.y != nullptr) of_y[i] = load_piece<kVectors, Cache::kStreaming>(y + column, left);
    }
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int64_t column = first + i * kPieceColumns, left = r.columns - column;
      if (left <= 0) continue;
      float values[kRouteColumns];
      AK_UNROLL
      for (int j = 0; j < kRouteColumns; j++) {
        dot += to_float(of_x[i][j]) * to_float(of_y[i][j]);
        values[j] = weight * to_float(of_x[i][j]);
      }
      store_piece<kVectors, Cache::kDefault>(out + column, values, left);
    }
  }
  if (p.dots == nullptr) return;
  dot = warp_sum(dot);
  if (lane_index() == 0) store(p.dots + row, dot);
}

/// `pieces`: of a row.
template <class Y, class Out, bool kVectors>
AK_KERNEL(kRouteThreads, kRouteBlocks)
combine_rows_kernel(AK_PARAM(CombineRows) p, int pieces) {
  constexpr int kInFlight = 4;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Routes& r = p.routes;
  const int64_t token = grid_warp() / pieces;
  const int64_t column = int64_t{grid_warp() % pieces} * kPieceColumns + lane_index() * kRouteColumns;
  const int64_t left = r.columns - column;
  if (token >= r.tokens || left <= 0) return;
  const Y* y = static_cast<const Y*>(p.y) + column;
  float sum[kRouteColumns] = {};
  AK_NO_UNROLL
  for (int first = 0; first < r.top_k; first += kInFlight) {
    int64_t place[kInFlight];
    float weight[kInFlight];
    Piece<Y> of_y[kInFlight] = {};
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const bool chosen = first + i < r.top_k;
      const int64_t choice = token * r.top_k + first + i;
      place[i] = chosen ? load(r.places + choice) : -1;
      weight[i] = chosen && r.weights != nullptr ? load(r.weights + choice) : 1.0f;
    }
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      if (place[i] >= r.rows()) place[i] = -1;
      if (place[i] >= 0) of_y[i] = load_piece<kVectors, Cache::kStreaming>(y + place[i] * r.columns, left);
    }
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      if (place[i] < 0) continue;
      AK_UNROLL
      for (int j = 0; j < kRouteColumns; j++) sum[j] += weight[i] * to_float(of_y[i][j]);
    }
  }
  store_piece<kVectors, Cache::kStreaming>(static_cast<Out*>(p.out) + token * r.columns + column, sum, left);
}

Status in_warps(const char* name, int64_t warps, Stream stream, auto run) {
  constexpr int kWarps = kRouteThreads / kWarpThreads;
  if (warps == 0) return {};
  if (warps > INT32_MAX - kWarps) return {1, "routing: more than 2^31 - 9 warps"};
  return run(LaunchConfig{.name = name,
                          .grid = static_cast<int>((warps + kWarps - 1) / kWarps),
                          .block = kRouteThreads,
                          .overlap_previous = true,
                          .stream = stream});
}

bool has_vectors(const Routes& r, std::initializer_list<const void*> matrices) {
  return r.columns % kRouteColumns == 0 && std::all_of(matrices.begin(), matrices.end(), vector_aligned);
}

template <class X, class Out>
Status run_spread(const SpreadRows& p, Stream stream) {
  return in_warps("spread_rows", p.routes.rows(), stream, [&](const LaunchConfig& config) {
    return has_vectors(p.routes, {p.x, p.y, p.out}) ? launch(spread_rows_kernel<X, Out, true>, config, p)
                                                    : launch(spread_rows_kernel<X, Out, false>, config, p);
  });
}

template <class Y, class Out>
Status run_combine(const CombineRows& p, Stream stream) {
  const int pieces = static_cast<int>((p.routes.columns + kPieceColumns - 1) / kPieceColumns);
  return in_warps("combine_rows", p.routes.tokens * pieces, stream, [&](const LaunchConfig& config) {
    return has_vectors(p.routes, {p.y, p.out}) ? launch(combine_rows_kernel<Y, Out, true>, config, p, pieces)
                                               : launch(combine_rows_kernel<Y, Out, false>, config, p, pieces);
  });
}

template <class Out>
Status spread_to(const SpreadRows& p, Stream stream) {
  return p.x_type == p.out_type ? run_spread<Out, Out>(p, stream) : run_spread<float, Out>(p, stream);
}

template <class Y>
Status combine_from(const CombineRows& p, Stream stream) {
  return p.out_type == p.y_type ? run_combine<Y, Y>(p, stream) : run_combine<Y, float>(p, stream);
}

}  // namespace

Status spread_rows(const SpreadRows& p, Stream stream) {
  if (p.out_type == DType::kFloat32) return spread_to<float>(p, stream);
  return p.out_type == DType::kBFloat16 ? spread_to<bf16>(p, stream) : spread_to<fp16>(p, stream);
}

Status combine_rows(const CombineRows& p, Stream stream) {
  if (p.y_type == DType::kFloat32) return combine_from<float>(p, stream);
  return p.y_type == DType::kBFloat16 ? combine_from<bf16>(p, stream) : combine_from<fp16>(p, stream);
}

}  // namespace ak
