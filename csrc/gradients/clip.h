// A gradient on its way to the optimizer: unscaled, tested, clipped.
//
// Source of the clip factor: torch.nn.utils.clip_grad_norm_ (min(1, max_norm / (norm + 1e-6))); of the inverse scale:
// torch.amp.GradScaler (the reciprocal is taken in double and rounded once).
#pragma once

#include "base/config.h"

namespace ak {

AK_HD float inverse_scale(float scale) { return static_cast<float>(div(1.0, static_cast<double>(scale))); }

// Its finiteness decides a skip and its square enters the norm. It is the unscaled value: with a scale below one a
// finite scaled gradient can be an infinite gradient.
AK_HD float unscale(float grad, float inv_scale) { return grad * inv_scale; }
AK_HD double unscale(double grad, float inv_scale) { return grad * static_cast<double>(inv_scale); }

// Never above 1. A NaN norm gives NaN, as in torch; an infinite one gives 0.
AK_HD float clip_factor(float sum_sq, float max_norm) {
  const float ratio = div(max_norm, sqrt(sum_sq) + 1e-6f);
  return ratio > 1.0f ? 1.0f : ratio;
}

// In place of a clip factor: the parameter stays as it is.
inline constexpr float kLeave = 2.0f;
AK_HD bool leaves(float factor) { return factor > 1.0f; }

// The gradient of the update: rounded after the unscaling, so that the tested value is the clipped one.
AK_HD float effective_grad(float grad, float inv_scale, float clip) { return unscale(grad, inv_scale) * clip; }

// A skip is any positive value: torch sums the flags of devices and ranks, so 2.0 occurs.
AK_HD bool found(float found_inf) { return found_inf > 0.0f; }

}  // namespace ak
