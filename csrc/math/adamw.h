// One AdamW (or Adam) step of one element, in fp32.
//
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, in the order of operations of
// torch's single-tensor implementation:
//   p *= 1 - lr wd;  m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2;  p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 -
//   b2^t) + eps)
// With coupled decay (Adam's L2 term) g += wd p instead of the first statement. AMSGrad (Reddi, Kale and Kumar, "On the
// convergence of Adam and beyond", ICLR 2018) divides by the root of the largest v so far; as in torch the maximum is
// taken of the moment before its bias is corrected.
#pragma once

#include "math/config.h"

namespace ak {

// What a parameter group sets.
struct AdamWOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool coupled_decay;
};

// What the elements of one tensor share in one step, derived once per tensor (or block) in double and rounded once.
struct AdamWScalars {
  float decay;       // 1 - lr wd, or 1 if the decay is coupled
  float l2;          // wd if the decay is coupled, else 0
  float take_m;      // 1 - beta1
  float keep_v;      // beta2
  float take_v;      // 1 - beta2
  float eps;         //
  float correction;  // sqrt(1 - beta2^t)
  float step_size;   // lr / (1 - beta1^t)
};

// base^exponent by squaring: unlike pow() of the different math libraries it has the same bits everywhere.
AK_HD double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

// `step` counts from 1: the value after the increment.
AK_HD AdamWScalars adamw_scalars(const AdamWOptions& o, float step) {
  const uint32_t t = static_cast<uint32_t>(step);
  const double correction1 = 1.0 - power(o.beta1, t);
  const double correction2 = 1.0 - power(o.beta2, t);
  AdamWScalars s;
  s.decay = o.coupled_decay ? 1.0f : static_cast<float>(1.0 - o.lr * o.weight_decay);
  s.l2 = o.coupled_decay ? static_cast<float>(o.weight_decay) : 0.0f;
  s.take_m = static_cast<float>(1.0 - o.beta1);
  s.keep_v = static_cast<float>(o.beta2);
  s.take_v = static_cast<float>(1.0 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.correction = static_cast<float>(sqrt(correction2));
  s.step_size = static_cast<float>(div(o.lr, correction1));
  return s;
}

// The larger of two; NaN if either is NaN, as torch.maximum.
AK_HD float larger(float a, float b) { return (a > b) | is_nan(a) ? a : b; }

namespace detail {

AK_HD void adamw_moments(float& p, float& m, float& v, float g, const AdamWScalars& s) {
  p *= s.decay;
  const float decayed = fma(s.l2, p, g);
  g = s.l2 != 0.0f ? decayed : g;  // not 0 * p: an infinite weight must not reach the moments
  m = fma(s.take_m, g - m, m);
  v = fma(s.take_v * g, g, s.keep_v * v);
}

AK_HD void adamw_weight(float& p, float m, float v, const AdamWScalars& s) {
  const float denominator = div(sqrt(v), s.correction) + s.eps;
  p = fma(-s.step_size, div(m, denominator), p);
}

}  // namespace detail

// `g` is the effective gradient: unscaled, clipped, negated when maximizing.
AK_HD void adamw(float& p, float& m, float& v, float g, const AdamWScalars& s) {
  detail::adamw_moments(p, m, v, g, s);
  detail::adamw_weight(p, m, v, s);
}

// The same with AMSGrad; `v_max` is the largest second moment so far.
AK_HD void amsgrad(float& p, float& m, float& v, float& v_max, float g, const AdamWScalars& s) {
  detail::adamw_moments(p, m, v, g, s);
  v_max = larger(v_max, v);
  detail::adamw_weight(p, m, v_max, s);
}

}  // namespace ak
