// The cross-entropy of one row of logits x, and its gradient, in fp32, with everything that may be in it:
//   loss = sum_j c_j (lse - x_j) + z_loss u lse^2,   lse = log sum_j exp(x_j)
//   dloss/dx_j = p_j (C + 2 z_loss u lse) - c_j,     p_j = exp(x_j - lse),  C = sum_j c_j
// A target that is a class t makes c_j = (1 - s) w_t [j = t] + s w_j / V, with the class weights w (or 1), the label
// smoothing s and V classes; one of probabilities y makes c_j = w_j ((1 - s) y_j + s / V). u, the weight of the row, is
// w_t or 1. The z-loss is that of PaLM (Chowdhery et al., arXiv:2204.02311).
//
// All logits are taken relative to the largest one, m, also that of the target: adding a number to a row changes the
// loss only by what the addition itself rounds, and lse, which does grow with m, enters by the z-loss alone.
#pragma once

#include "math/config.h"

namespace ak {

// What all rows have in common.
struct CrossEntropyTerms {
  float own;     // 1 - s
  float shared;  // s / V
  float z_loss;
};

// What one read of a row finds.
struct CrossEntropySums {
  float largest;  // m
  float sum_exp;  // sum of exp(x_j - m)
  float total;    // C
  float moved;    // sum of c_j (x_j - m)
  float row;      // u
};

struct CrossEntropyRow {
  float loss;
  float slope;  // C + 2 z_loss u lse, over sum_exp: what exp(x_j - m) is multiplied by in the gradient
};

// The larger of two; of a number and NaN the number.
AK_HD float max_number(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a > b || b != b ? a : b;
#endif
}

// log(x) for normal x > 0, to 1.2 u of the larger of 1 and the result; NaN stays NaN. The polynomial is that of Cephes
// (Moshier), logf.
AK_HD float log_positive(float x) {
  const uint32_t bits = bits_of(x);
  // x = 2^n y with sqrt(1/2) <= y < sqrt(2).
  const int32_t n = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float y = float_of(bits - (static_cast<uint32_t>(n) << 23)) - 1.0f;
  const float square = y * y;
  float p = 7.0376836292e-2f;
  p = fma(p, y, -1.1514610310e-1f);
  p = fma(p, y, 1.1676998740e-1f);
  p = fma(p, y, -1.2420140846e-1f);
  p = fma(p, y, 1.4249322787e-1f);
  p = fma(p, y, -1.6668057665e-1f);
  p = fma(p, y, 2.0000714765e-1f);
  p = fma(p, y, -2.4999993993e-1f);
  p = fma(p, y, 3.3333331174e-1f);
  p = p * y * square;
  const float exponent = static_cast<float>(n);
  p = fma(exponent, -2.12194440e-4f, p);
  p = fma(square, -0.5f, p);
  const float result = fma(exponent, 0.693359375f, y + p);
  return is_finite(x) ? result : x;
}

// exp(x) for x <= 0, -inf included, to 1.4 u; NaN stays NaN. 2^n e^r with |r| <= ln 2 / 2; polynomial and split of ln 2
// from Cephes (Moshier), expf. Results that round to zero come out as zero.
AK_HD float exp_of_logit(float x) {
  x = x < -128.0f ? -128.0f : x;
  const float shifted = fma(x, 0x1.715476p+0f, 0x1.8p23f);  // x / ln 2, rounded to an integer in the low mantissa bits
  const float n = shifted - 0x1.8p23f;
  float r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  float q = 1.9875691500e-4f;
  q = fma(q, r, 1.3981999507e-3f);
  q = fma(q, r, 8.3334519073e-3f);
  q = fma(q, r, 4.1665795894e-2f);
  q = fma(q, r, 1.6666665459e-1f);
  q = fma(q, r, 5.0000001201e-1f);
  const float mantissa = fma(q, r * r, r) + 1.0f;
  // In two factors, because 2^n itself may be too small for a normal number.
  const int32_t exponent = static_cast<int32_t>(bits_of(shifted) - 0x4b400000u);
  const int32_t half = exponent >> 1;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(exponent - half + 127) << 23);
  return mantissa * first * second;
}

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
