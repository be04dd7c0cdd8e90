// update_scale_ on the CPU: the rule of gradients/loss_scale.h on the flags of all optimizers.
#include <algorithm>

#include "gradients/call.h"
#include "gradients/clip.h"

namespace ak {

size_t update_scale_scratch_bytes(size_t) { return 0; }

Status update_scale(const LossScaleRef& at, std::span<const float* const> found_infs, const LossScaleOptions& options,
                    void*, Stream) {
  const bool overflow =
      std::any_of(found_infs.begin(), found_infs.end(), [](const float* flag) { return found(*flag); });
  const LossScale updated =
      update_loss_scale({*at.scale, *at.growth_tracker, *at.hysteresis_tracker}, overflow, options);
  *at.scale = updated.scale;
  *at.growth_tracker = updated.growth_tracker;
  *at.hysteresis_tracker = updated.hysteresis_tracker;
  if (at.skipped_steps) *at.skipped_steps = count_skips(*at.skipped_steps, overflow);
  if (at.consecutive_skips) *at.consecutive_skips = count_consecutive_skips(*at.consecutive_skips, overflow);
  return {};
}

}  // namespace ak
