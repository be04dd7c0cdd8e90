// One LAMB step of one element, in fp32, and the trust ratio of a tensor.
//
// Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020 (algorithm
// 2, with the bias correction of its authors' code). The step along Adam's direction, decay included, is as long as a
// share of the tensor's norm:
//   m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2;  u = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps) + wd p
//   p -= lr |p| / |u| u,    |.| = the L2 norm over the tensor
// A step is two passes, because the norms must be known before the first weight moves. The second pass recomputes u,
// which is cheaper than storing it, from the moments as stored (they may have been rounded to bf16). The first pass
// must use the stored moments too, or the norm would be that of another vector.
#pragma once

#include "update/rule.h"

namespace ak {

struct Lamb {
  static constexpr const char* kName = "lamb_";
  static constexpr int kMoments = 2, kRequiredMoments = 2, kOptions = 5;
  static constexpr uint32_t kUnsigned = 0b10;
  static constexpr bool kHasStage = true;

  struct Options {
    double lr, beta1, beta2, eps, weight_decay;
    bool bias_correction;
    bool adapt_all;  // false: the trust ratio is 1 in groups without decay, which hold biases and norms
  };
  static Options options(const double* o, int64_t flags) {
    return {o[0], o[1], o[2], o[3], o[4], (flags & kNoBiasCorrection) == 0, (flags & kAdaptAll) != 0};
  }

  struct Scalars {
    double lr;
    float take_m;      // 1 - beta1
    float keep_v;      // beta2
    float take_v;      // 1 - beta2
    float eps;         //
    float correction;  // sqrt(1 - beta2^t)
    float scale_m;     // 1 / (1 - beta1^t)
    float decay;       // wd
    float adapt;       // 1, or 0: the trust ratio is 1
    float rate;        // length of the step: rate_of after the first pass
  };
  static AK_HD Scalars scalars(const Options& o, float step) {
    const uint32_t t = static_cast<uint32_t>(step);
    Scalars s;
    s.lr = o.lr;
    s.take_m = static_cast<float>(1.0 - o.beta1);
    s.keep_v = static_cast<float>(o.beta2);
    s.take_v = static_cast<float>(1.0 - o.beta2);
    s.eps = static_cast<float>(o.eps);
    s.correction = o.bias_correction ? static_cast<float>(sqrt(1.0 - power(o.beta2, t))) : 1.0f;
    s.scale_m = o.bias_correction ? static_cast<float>(div(1.0, 1.0 - power(o.beta1, t))) : 1.0f;
    s.decay = static_cast<float>(o.weight_decay);
    s.adapt = o.adapt_all || o.weight_decay != 0.0 ? 1.0f : 0.0f;
    s.rate = 0.0f;
    return s;
  }

  // The first pass.
  static AK_HD void move_moments(float& m, float& v, float g, const Scalars& s) {
    m = fma(s.take_m, g - m, m);
    v = fma(s.take_v * g, g, s.keep_v * v);
  }

  // The direction u, from the moments as stored.
  static AK_HD float direction(float p, float m, float v, const Scalars& s) {
    const float adam = div(m, div(sqrt(v), s.correction) + s.eps) * s.scale_m;
    const float decayed = fma(s.decay, p, adam);
    return s.decay != 0.0f ? decayed : adam;  // not 0 * p: an infinite weight is not NaN
  }

  // The length of the step, from the squared norms of weights and direction. The ratio is 1 if either is 0.
  static AK_HD float rate_of(double weight_sq, double direction_sq, const Scalars& s) {
    const bool adapts = s.adapt != 0.0f && weight_sq != 0.0 && direction_sq != 0.0;  // NaN adapts, and stays NaN
    return static_cast<float>(adapts ? s.lr * div(sqrt(weight_sq), sqrt(direction_sq)) : s.lr);
  }

  // The second pass: the moments are up to date, the gradient is not used.
  static AK_HD void update(float& p, float (&moments)[2], bool, float, const Scalars& s) {
    p = fma(-s.rate, direction(p, moments[0], moments[1], s), p);
  }
};

}  // namespace ak
