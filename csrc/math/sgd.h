// One SGD step of one element, in fp32, in the order of operations of torch.optim.SGD:
//   g += wd p;  buffer = momentum buffer + (1 - dampening) g (first step: buffer = g);  g = nesterov ? g + momentum
//   buffer : buffer; p -= lr g
// Source of the momentum form: Sutskever et al., "On the importance of initialization and momentum in deep learning",
// ICML 2013.
#pragma once

#include "math/config.h"

namespace ak {

struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
};

struct SgdScalars {
  float lr, momentum, take, weight_decay;
  bool nesterov;
  bool first;  // the buffer holds nothing yet and is not read
};

// `step` counts from 1: the value after the increment. The first step that is not skipped is number 1, so a buffer that
// an overflow left untouched is never taken for history.
AK_HD SgdScalars sgd_scalars(const SgdOptions& o, float step) {
  return {static_cast<float>(o.lr),
          static_cast<float>(o.momentum),
          static_cast<float>(1.0 - o.dampening),
          static_cast<float>(o.weight_decay),
          o.nesterov,
          step == 1.0f};
}

// `g` is the effective gradient: unscaled, clipped, negated when maximizing.
AK_HD float sgd_decayed(float p, float g, const SgdScalars& s) {
  const float decayed = fma(s.weight_decay, p, g);
  return s.weight_decay != 0.0f ? decayed : g;
}

AK_HD void sgd(float& p, float g, const SgdScalars& s) { p = fma(-s.lr, sgd_decayed(p, g, s), p); }

AK_HD void sgd_momentum(float& p, float& buffer, float g, const SgdScalars& s) {
  g = sgd_decayed(p, g, s);
  const float history = fma(s.momentum, buffer, s.take * g);
  buffer = s.first ? g : history;
  const float ahead = fma(s.momentum, buffer, g);
  p = fma(-s.lr, s.nesterov ? ahead : buffer, p);
}

}  // namespace ak
