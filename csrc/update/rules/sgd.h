// One SGD step of one element, in fp32, in the order of operations of torch.optim.SGD:
//   g += wd p;  buffer = momentum buffer + (1 - dampening) g (first step: buffer = g);  g = nesterov ? g + momentum
//   buffer : buffer; p -= lr g
// Source of the momentum form: Sutskever et al., "On the importance of initialization and momentum in deep learning",
// ICML 2013.
#pragma once

#include "update/rule.h"

namespace ak {

struct Sgd {
  static constexpr const char* kName = "sgd_";
  static constexpr int kMoments = 1, kRequiredMoments = 0, kOptions = 4;

  struct Options {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, cautious;
  };
  static Options options(const double* o, int64_t flags) {
    return {o[0], o[1], o[2], o[3], (flags & kNesterov) != 0, (flags & kCautious) != 0};
  }

  struct Scalars {
    float lr, momentum, take, weight_decay;
    bool nesterov, cautious;
    bool first;  // the buffer holds no history yet
  };
  // The first step that is not skipped is number 1, so a buffer that a skipped step left uninitialized is never read as
  // history.
  static AK_HD Scalars scalars(const Options& o, float step) {
    return {static_cast<float>(o.lr),
            static_cast<float>(o.momentum),
            static_cast<float>(1.0 - o.dampening),
            static_cast<float>(o.weight_decay),
            o.nesterov,
            o.cautious,
            step == 1.0f};
  }

  static AK_HD void update(float& p, float (&moments)[1], bool momentum, float g, const Scalars& s) {
    const float decayed = fma(s.weight_decay, p, g);
    g = s.weight_decay != 0.0f ? decayed : g;
    if (momentum) {
      float& buffer = moments[0];
      const float history = fma(s.momentum, buffer, s.take * g);
      buffer = s.first ? g : history;
      const float ahead = fma(s.momentum, buffer, g);
      g = cautious_direction(s.nesterov ? ahead : buffer, g, s.cautious);
    }
    p = fma(-s.lr, g, p);
  }
};

}  // namespace ak
