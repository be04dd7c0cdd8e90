// The next loss scale, decided on the device from what any number of checks found.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "gradients/loss_scale.h"

namespace ak {

/// Where the loss scale and its trackers (gradients/loss_scale.h) are on the device.
struct LossScaleRef {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  int64_t *skipped_steps, *consecutive_skips;  // may be null
};

/// Bytes of device memory one call needs, 0 as a rule; they may hold anything.
size_t update_scale_scratch_bytes(size_t found_infs);

/// One step of the rule; an overflow is a positive value among `found_infs`. `scratch` is aligned to 4 bytes.
Status update_scale(const LossScaleRef& scale, std::span<const float* const> found_infs,
                    const LossScaleOptions& options, void* scratch, Stream stream);

}  // namespace ak
