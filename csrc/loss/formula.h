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

#include "base/config.h"

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

// The larger of two; NaN is ignored if the other is a number.
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

// 2^64 exp(x) for -128 <= x <= 0, to 1.3 u: a normal number also where exp(x) is not; NaN stays NaN. It is 2^n e^r with
// |r| <= ln 2 / 2, ln 2 split in two (Cody and Waite), and a polynomial of least relative error, 0.05 u.
inline constexpr float kExpUnscale = 0x1p-64f, kLeastLogit = -128.0f;
AK_HD float scaled_exp(float x) {
  constexpr float kShift = 0x1.8p23f + 127.0f + 64.0f;   // x / ln 2, rounded, plus the bias of an exponent and 64 ...
  const float shifted = fma(x, 0x1.715476p+0f, kShift);  // ... in the low bits of the mantissa
  const float n = shifted - kShift;
  float r = fma(n, -0x1.62e4p-1f, x);
  r = fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a5234p-10f;
  p = fma(p, r, 0x1.12396cp-7f);
  p = fma(p, r, 0x1.5558aap-5f);
  p = fma(p, r, 0x1.555492p-3f);
  p = fma(p, r, 0x1.fffffcp-2f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  return p * float_of(bits_of(shifted) << 23);
}
// Clamps logits whose exponential rounds to zero, -inf included, to the least number whose scaled_exp is right.
AK_HD float logit_in_range(float x) { return x < kLeastLogit ? kLeastLogit : x; }
// exp(x) for x <= 0.
AK_HD float exp_of_logit(float x) { return scaled_exp(logit_in_range(x)) * kExpUnscale; }

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
