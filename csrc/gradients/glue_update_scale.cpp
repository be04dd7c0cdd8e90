// update_scale_ on a GPU: checks, memory, launch of gradients/update_scale.cu.
#include "gradients/update_scale.h"

#include "base/gpu/call.h"

namespace ak {
namespace {

constexpr const char* kOp = "update_scale_";

void run_update_scale(const Tensor scale, const Tensor growth_tracker, const Tensor hysteresis_tracker,
                      const TensorList found_infs, double growth_factor, double backoff_factor, int64_t growth_interval,
                      double min_scale, double max_scale, int64_t hysteresis, bool consecutive,
                      const std::optional<Tensor> skipped_steps, const std::optional<Tensor> consecutive_skips) {
  GpuCall call(kOp, {"scale"}, scale);
  const LossScaleRef at{call.mutable_scalar<float>({"scale"}, scale),
                        call.mutable_scalar<int32_t>({"growth_tracker"}, growth_tracker),
                        call.mutable_scalar<int32_t>({"hysteresis_tracker"}, hysteresis_tracker),
                        call.mutable_scalar<int64_t>({"skipped_steps"}, skipped_steps),
                        call.mutable_scalar<int64_t>({"consecutive_skips"}, consecutive_skips)};
  std::vector<const float*> flags;
  flags.reserve(found_infs.size());
  for (size_t i = 0; i < found_infs.size(); ++i) {
    flags.push_back(call.scalar({"found_infs", static_cast<int64_t>(i)}, found_infs[i]));
  }
  std::optional<Tensor> scratch;  // as a rule none is needed
  if (const size_t bytes = update_scale_scratch_bytes(flags.size())) scratch = call.scratch(bytes);
  const LossScaleOptions options{growth_factor, backoff_factor, growth_interval, min_scale,
                                 max_scale,     hysteresis,     consecutive};
  call.launch(update_scale, at, flags, options, scratch ? scratch->mutable_data_ptr() : nullptr);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("update_scale_", TORCH_BOX(&ak::run_update_scale)); }
