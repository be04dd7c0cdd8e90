// The loss scale's update after a step: torch.amp.GradScaler's rule with Megatron-LM's bounds and hysteresis, and
// DeepSpeed's choice of what the hysteresis counts.
//
// A step with a non-finite gradient halves the scale (backoff_factor) after `hysteresis` of them since the scale last
// grew, or in a row if `consecutive`; growth_interval steps without one double it (growth_factor), unless the product
// is not finite. With min_scale 0, max_scale inf and hysteresis 1 this is torch's rule to the bit. Products are formed
// in double, as torch does.
#pragma once

#include "base/config.h"

namespace ak {

struct LossScaleOptions {
  double growth_factor, backoff_factor;
  int64_t growth_interval;  // 0: never grow
  double min_scale, max_scale;
  int64_t hysteresis;
  bool consecutive;  // any step without an overflow refills the hysteresis
};

struct LossScale {
  float scale;
  int32_t growth_tracker;
  int32_t hysteresis_tracker;  // overflows still tolerated before the scale backs off
};

/// The number of iterations with an overflow: in all, and the last ones in a row.
AK_HD int64_t count_skips(int64_t before, bool overflow) { return overflow ? before + 1 : before; }
AK_HD int64_t count_consecutive_skips(int64_t before, bool overflow) { return overflow ? before + 1 : 0; }

AK_HD LossScale update_loss_scale(LossScale s, bool overflow, const LossScaleOptions& o) {
  if (overflow) {
    s.growth_tracker = 0;
    s.hysteresis_tracker -= 1;
    if (s.hysteresis_tracker <= 0) {
      const float reduced = static_cast<float>(s.scale * o.backoff_factor);
      const float floor = static_cast<float>(o.min_scale);
      s.scale = reduced > floor ? reduced : floor;
    }
    return s;
  }
  if (o.consecutive) s.hysteresis_tracker = static_cast<int32_t>(o.hysteresis);
  s.growth_tracker += 1;
  if (s.growth_tracker == o.growth_interval) {
    s.growth_tracker = 0;
    const float grown = static_cast<float>(s.scale * o.growth_factor);
    if (is_finite(grown)) {
      const float ceiling = static_cast<float>(o.max_scale);
      s.scale = grown < ceiling ? grown : ceiling;
      s.hysteresis_tracker = static_cast<int32_t>(o.hysteresis);
    }
  }
  return s;
}

}  // namespace ak
