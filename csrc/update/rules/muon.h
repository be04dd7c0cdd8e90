// Both elementwise passes of a Muon step, in fp32.
//
// Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, as in torch.optim.Muon:
//   m = lerp(m, g, 1 - mu);  u = nesterov ? lerp(g, m, mu) : m;  o = NewtonSchulz(u);  p = p (1 - lr wd) - lr ratio o
// The pass before the matrix products has the momentum: its weight is the 16-bit iterate, which becomes u whatever it
// was. The pass after them has none: its gradient is o. Cautious decay (Chen et al., "Cautious weight decay", 2025)
// spares the weights that o moves away from 0.
#pragma once

#include "update/rule.h"

namespace ak {

// a + take (b - a) with keep = 1 - take, in torch.lerp's two forms: exactly b for take = 1.
AK_HD float lerp(float a, float b, float keep, float take) {
  return take < 0.5f ? fma(take, b - a, a) : fma(keep, a - b, b);
}

struct Muon {
  static constexpr const char* kName = "muon_";
  static constexpr int kMoments = 1, kRequiredMoments = 0, kOptions = 4;

  struct Options {
    double lr, momentum, ratio, weight_decay;
    bool nesterov, cautious;
  };
  static Options options(const double* o, int64_t flags) {
    return {o[0], o[1], o[2], o[3], (flags & kNesterov) != 0, (flags & kCautious) != 0};
  }

  struct Scalars {
    float keep, take;  // momentum and 1 - momentum
    float rate;        // lr ratio
    float decay;       // 1 - lr wd
    bool nesterov, cautious;
  };
  static AK_HD Scalars scalars(const Options& o, float) {
    return {static_cast<float>(o.momentum),
            static_cast<float>(1.0 - o.momentum),
            static_cast<float>(o.lr * o.ratio),
            static_cast<float>(1.0 - o.lr * o.weight_decay),
            o.nesterov,
            o.cautious};
  }

  static AK_HD void update(float& p, float (&moments)[1], bool before, float g, const Scalars& s) {
    if (before) {
      float& m = moments[0];
      m = lerp(m, g, s.keep, s.take);
      const float ahead = lerp(g, m, s.take, s.keep);
      p = s.nesterov ? ahead : m;
    } else {
      const float keep = !s.cautious || g * p >= 0.0f ? s.decay : 1.0f;
      p = fma(-s.rate, g, p * keep);
    }
  }
};

}  // namespace ak
