// The calls of spread_rows and combine_rows: rows of tokens to the order of their groups, and back.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// A token has `top_k` rows of its own: choice j of token t is row places[t, j] of `tokens * top_k` rows. The rows of
/// all tokens are a permutation; a place out of range is passed over. Without weights each is 1. Matrices are dense and
/// have `columns` columns.
struct Routes {
  const int32_t* places;
  const float* weights;
  int64_t tokens, columns;
  int top_k;

  AK_HD int64_t rows() const { return tokens * top_k; }
};

/// out[places[t, j]] = weights[t, j] * x[t] in fp32, rounded once. With y, a row for each of out in its type, besides
/// dots[t, j] = the sum of x[t] * y[places[t, j]] in fp32.
struct SpreadRows {
  Routes routes;
  const void *x, *y;
  void* out;
  float* dots;             // null without y, which may have no columns and then no address
  DType x_type, out_type;  // equal, or fp32 to 16 bits
};
Status spread_rows(const SpreadRows& call, Stream stream);

/// out[t] = the sum of weights[t, j] * y[places[t, j]] in fp32, added in the order of j, rounded once.
struct CombineRows {
  Routes routes;
  const void* y;
  void* out;
  DType y_type, out_type;  // equal, or 16 bits to fp32
};
Status combine_rows(const CombineRows& call, Stream stream);

}  // namespace ak
