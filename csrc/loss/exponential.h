// Exponential and logarithm of logits in fp32, as polynomials of elementary operations: their bits are the same on
// every CPU. A row is taken relative to its largest value, which ignores NaN; the sum of exponentials does not.
#pragma once

#include "base/config.h"

namespace ak {

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

// The subtrahend of a row's values: the largest, or 0 for a row of nothing but -inf, so that -inf - (-inf), NaN, is not
// computed.
AK_HD float finite_base(float largest) { return largest == -__builtin_huge_valf() ? 0.0f : largest; }

}  // namespace ak
