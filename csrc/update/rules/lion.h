// One Lion step of one element, in fp32.
//
// Source: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, with decoupled decay:
//   c = b1 m + (1 - b1) g;  p -= lr (sign(c) + wd p);  m = b2 m + (1 - b2) g
#pragma once

#include "update/rule.h"

namespace ak {

// -1, 0 or 1. NaN stays NaN, unlike torch.sign's 0: a broken gradient must not look like zero.
AK_HD float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

struct Lion {
  static constexpr const char* kName = "lion_";
  static constexpr int kMoments = 1, kRequiredMoments = 1, kOptions = 4;

  struct Options {
    double lr, beta1, beta2, weight_decay;
    bool cautious;
  };
  static Options options(const double* o, int64_t flags) { return {o[0], o[1], o[2], o[3], (flags & kCautious) != 0}; }

  struct Scalars {
    float lr;
    float decay;           // 1 - lr wd
    float keep_c, take_c;  // beta1 and 1 - beta1
    float keep_m, take_m;  // beta2 and 1 - beta2
    bool cautious;
  };
  // No bias correction: only the sign of the moment counts.
  static AK_HD Scalars scalars(const Options& o, float) {
    return {static_cast<float>(o.lr),
            static_cast<float>(1.0 - o.lr * o.weight_decay),
            static_cast<float>(o.beta1),
            static_cast<float>(1.0 - o.beta1),
            static_cast<float>(o.beta2),
            static_cast<float>(1.0 - o.beta2),
            o.cautious};
  }

  static AK_HD void update(float& p, float (&moments)[1], bool, float g, const Scalars& s) {
    float& m = moments[0];
    const float c = fma(s.keep_c, m, s.take_c * g);
    p = fma(-s.lr, sign(cautious_direction(c, g, s.cautious)), p * s.decay);
    m = fma(s.keep_m, m, s.take_m * g);
  }
};

}  // namespace ak
