// unscale_(grads, found_inf, inv_scale) on a GPU: checks, launch of gradients/unscale.cu.
#include "gradients/unscale.h"

#include "base/gpu/call.h"

namespace ak {
namespace {

constexpr const char* kOp = "unscale_";

void run_unscale(const TensorList grads, const std::optional<Tensor> found_inf, const Tensor inv_scale) {
  GpuCall call(kOp, {"inv_scale"}, inv_scale);
  const std::vector<MutableGradRef> refs = call.grad_refs<void>(grads);
  const float* factor = call.scalar({"inv_scale"}, inv_scale);
  float* flag = call.mutable_scalar<float>({"found_inf"}, found_inf);
  call.launch(unscale, refs, flag, factor);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("unscale_", TORCH_BOX(&ak::run_unscale)); }
