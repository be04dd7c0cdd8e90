// The cross-entropy of one row of logits x, and its gradient, in fp32, with weights, smoothing and z-loss:
//   loss = sum_j c_j (lse - x_j) + z_loss u lse^2,   lse = log sum_j exp(x_j)
//   dloss/dx_j = p_j (C + 2 z_loss u lse) - c_j,     p_j = exp(x_j - lse),  C = sum_j c_j
// For a class target t, c_j = (1 - s) w_t [j = t] + s w_j / V, with the class weights w (or 1), the label smoothing s
// and V classes; for probabilities y, c_j = w_j ((1 - s) y_j + s / V). u, the weight of the row, is w_t or 1. The
// z-loss is PaLM's (Chowdhery et al., arXiv:2204.02311).
//
// All logits, also the target's, are taken relative to the maximum m: adding a constant to a row changes the loss only
// by the rounding of that addition. lse, which does grow with m, enters through the z-loss alone.
#pragma once

#include "loss/exponential.h"

namespace ak {

// Shared by all rows.
struct CrossEntropyTerms {
  float own;     // 1 - s
  float shared;  // s / V
  float z_loss;
};

// Host only.
inline CrossEntropyTerms cross_entropy_terms(double label_smoothing, double z_loss, int64_t classes) {
  return {static_cast<float>(1.0 - label_smoothing), static_cast<float>(label_smoothing / static_cast<double>(classes)),
          static_cast<float>(z_loss)};
}

// The sums of one pass over a row.
struct CrossEntropySums {
  float largest;  // m
  float sum_exp;  // sum of exp(x_j - m)
  float total;    // C
  float moved;    // sum of c_j (x_j - m)
  float row;      // u
};

struct CrossEntropyRow {
  float loss;
  float slope;  // (C + 2 z_loss u lse) / sum_exp: the factor of exp(x_j - m) in the gradient
};

AK_HD CrossEntropyRow cross_entropy_row(const CrossEntropyTerms& terms, const CrossEntropySums& sums) {
  const float log_sum = log_positive(sums.sum_exp);
  float loss = fma(sums.total, log_sum, -sums.moved);
  float slope = sums.total;
  if (terms.z_loss != 0.0f) {
    const float lse = sums.largest + log_sum, scaled = terms.z_loss * sums.row * lse;
    loss = fma(scaled, lse, loss);
    slope = fma(2.0f, scaled, slope);
  }
  return {loss, div(slope, sums.sum_exp)};
}

}  // namespace ak
