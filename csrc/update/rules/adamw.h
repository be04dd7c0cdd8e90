// One AdamW (or Adam) step of one element, in fp32.
//
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, in the order of operations of
// torch's single-tensor implementation:
//   p *= 1 - lr wd;  m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2;  p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 -
//   b2^t) + eps)
// With coupled decay (Adam's L2 term) g += wd p instead of the first statement. AMSGrad (Reddi, Kale and Kumar, "On the
// convergence of Adam and beyond", ICLR 2018) divides by the root of the largest v so far, the optional third moment;
// as in torch the maximum is taken of the moment before its bias is corrected.
#pragma once

#include "update/rule.h"

namespace ak {

// The larger of two; NaN if either is NaN, as torch.maximum.
AK_HD float larger(float a, float b) { return (a > b) | is_nan(a) ? a : b; }

struct AdamW {
  static constexpr const char* kName = "adamw_";
  static constexpr int kMoments = 3, kRequiredMoments = 2, kOptions = 5;
  static constexpr uint32_t kUnsigned = 0b110;

  struct Options {
    double lr, beta1, beta2, eps, weight_decay;
    bool coupled_decay, cautious;
  };
  static Options options(const double* o, int64_t flags) {
    return {o[0], o[1], o[2], o[3], o[4], (flags & kCoupledDecay) != 0, (flags & kCautious) != 0};
  }

  struct Scalars {
    float decay;       // 1 - lr wd, or 1 if the decay is coupled
    float l2;          // wd if the decay is coupled, else 0
    float take_m;      // 1 - beta1
    float keep_v;      // beta2
    float take_v;      // 1 - beta2
    float eps;         //
    float correction;  // sqrt(1 - beta2^t)
    float reciprocal;  // of the correction
    float step_size;   // lr / (1 - beta1^t)
    bool cautious;     //
  };
  static AK_HD Scalars scalars(const Options& o, float step) {
    const uint32_t t = static_cast<uint32_t>(step);
    const double correction1 = 1.0 - power(o.beta1, t);
    const double correction2 = 1.0 - power(o.beta2, t);
    Scalars s;
    s.decay = o.coupled_decay ? 1.0f : static_cast<float>(1.0 - o.lr * o.weight_decay);
    s.l2 = o.coupled_decay ? static_cast<float>(o.weight_decay) : 0.0f;
    s.take_m = static_cast<float>(1.0 - o.beta1);
    s.keep_v = static_cast<float>(o.beta2);
    s.take_v = static_cast<float>(1.0 - o.beta2);
    s.eps = static_cast<float>(o.eps);
    s.correction = static_cast<float>(sqrt(correction2));
    s.reciprocal = div(1.0f, s.correction);
    s.step_size = static_cast<float>(div(o.lr, correction1));
    s.cautious = o.cautious;
    return s;
  }

  // With these magnitudes a quotient is between 2^-121 and 2^120, and what is left of its dividend at least 2^-108.
  static constexpr Magnitudes kNormal[kMoments] = {{-60, 60}, {-100, 60}, {-100, 60}};
  static AK_HD bool is_plain(const Scalars& s) {
    return s.l2 == 0.0f && !s.cautious && s.eps >= 0x1p-60f && s.eps < 0x1p60f;  // the root of v may be 0
  }
  static AK_HD Scalars plain(Scalars s) {
    s.l2 = 0.0f;
    s.cautious = false;
    return s;
  }

  template <class Numbers = AllNumbers>
  static AK_HD void update(float& p, float (&moments)[3], bool amsgrad, float g, const Scalars& s) {
    float &m = moments[0], &v = moments[1], &v_max = moments[2];
    p *= s.decay;
    const float decayed = fma(s.l2, p, g);
    g = s.l2 != 0.0f ? decayed : g;  // not 0 * p: an infinite weight must not reach the moments
    m = fma(s.take_m, g - m, m);
    v = fma(s.take_v * g, g, s.keep_v * v);
    if (amsgrad) v_max = larger(v_max, v);
    const float root = Numbers::sqrt(amsgrad ? v_max : v);
    const float denominator = Numbers::divide(root, s.correction, s.reciprocal) + s.eps;
    p = fma(-s.step_size, Numbers::div(cautious_direction(m, g, s.cautious), denominator), p);
  }
};

}  // namespace ak
