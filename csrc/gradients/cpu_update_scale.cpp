// update_scale_: moves the loss scale and its trackers after a step, by the rule of gradients/loss_scale.h, from all
// optimizers' found_inf.
#include "base/cpu/arguments.h"
#include "gradients/clip.h"
#include "gradients/loss_scale.h"

namespace ak {
namespace {

constexpr const char* kOp = "update_scale_";

void update_scale_(const Tensor scale, const Tensor growth_tracker, const Tensor hysteresis_tracker,
                   const TensorList found_infs, double growth_factor, double backoff_factor, int64_t growth_interval,
                   double min_scale, double max_scale, int64_t hysteresis, bool consecutive,
                   const std::optional<Tensor> skipped_steps, const std::optional<Tensor> consecutive_skips) {
  float* scale_data = scalar_data<float>(kOp, {"scale"}, scale);
  int32_t* growth_data = scalar_data<int32_t>(kOp, {"growth_tracker"}, growth_tracker);
  int32_t* hysteresis_data = scalar_data<int32_t>(kOp, {"hysteresis_tracker"}, hysteresis_tracker);
  int64_t* skipped_data = skipped_steps ? scalar_data<int64_t>(kOp, {"skipped_steps"}, *skipped_steps) : nullptr;
  int64_t* consecutive_data =
      consecutive_skips ? scalar_data<int64_t>(kOp, {"consecutive_skips"}, *consecutive_skips) : nullptr;
  bool overflow = false;
  for (size_t i = 0; i < found_infs.size(); ++i) {
    overflow |= found(read_scalar<float>(kOp, {"found_infs", static_cast<int64_t>(i)}, found_infs[i]));
  }
  const LossScale updated = update_loss_scale(
      {*scale_data, *growth_data, *hysteresis_data}, overflow,
      {growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, consecutive});
  *scale_data = updated.scale;
  *growth_data = updated.growth_tracker;
  *hysteresis_data = updated.hysteresis_tracker;
  if (skipped_data != nullptr) *skipped_data = count_skips(*skipped_data, overflow);
  if (consecutive_data != nullptr) *consecutive_data = count_consecutive_skips(*consecutive_data, overflow);
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("update_scale_", TORCH_BOX(&ak::update_scale_)); }
