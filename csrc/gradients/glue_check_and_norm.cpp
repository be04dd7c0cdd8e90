// check_and_norm(grads, grad_scale, norm_type, per_tensor) -> (sums of squares or largest magnitudes, found_inf) on a
// GPU: checks, memory, launch of gradients/check_and_norm.cu.
#include "gradients/check_and_norm.h"

#include "base/gpu/call.h"
#include "gradients/norm_type.h"

namespace ak {
namespace {

constexpr const char* kOp = "check_and_norm";

std::tuple<Tensor, Tensor> run(GpuCall& call, const std::vector<GradRef>& refs, const std::optional<Tensor>& grad_scale,
                               Norm norm, bool per_tensor) {
  const float* scale = call.scalar({"grad_scale"}, grad_scale);
  const std::vector<int64_t> shape(per_tensor ? 1 : 0, static_cast<int64_t>(refs.size()));
  const Tensor norms = call.empty({"norms"}, shape, ScalarType::Float);
  const Tensor found_inf = call.empty({"found_inf"}, shape, ScalarType::Float);
  float* norms_at = static_cast<float*>(norms.mutable_data_ptr());
  float* found_at = static_cast<float*>(found_inf.mutable_data_ptr());

  if (per_tensor) {
    const bool any_empty = std::any_of(refs.begin(), refs.end(), [](const GradRef& g) { return g.numel == 0; });
    for (const Tensor& result : {norms, found_inf}) call.zero(result, any_empty ? sizeof(float) * refs.size() : 0);
    const Tensor scratch = call.scratch(check_and_norm_per_tensor_scratch_bytes(refs));
    call.launch(check_and_norm_per_tensor, refs, scale, norm, scratch.mutable_data_ptr(), norms_at, found_at);
  } else {
    const Tensor scratch = call.scratch(check_and_norm_scratch_bytes(refs));
    uint32_t* blocks_done = call.counters(1);
    call.launch(check_and_norm, refs, scale, norm, scratch.mutable_data_ptr(), blocks_done, norms_at, found_at);
  }
  return {norms, found_inf};
}

std::tuple<Tensor, Tensor> run_check_and_norm(const TensorList& grads, const std::optional<Tensor>& grad_scale,
                                              double norm_type, bool per_tensor) {
  AK_CHECK(!grads.empty(), kOp, ": grads must not be empty");
  const Norm norm = norm_of(kOp, norm_type);
  GpuCall call(kOp, {"grads", 0}, grads[0]);
  return run(call, call.grad_refs<const void>(grads), grad_scale, norm, per_tensor);
}

std::tuple<Tensor, Tensor> run_check_and_norm_table(const Tensor& like, const Tensor& table,
                                                    const std::optional<Tensor>& grad_scale, bool per_tensor) {
  GpuCall call(kOp, {"like"}, like);
  return run(call, call.grad_refs(table), grad_scale, Norm::kSumOfSquares, per_tensor);
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) {
  m.impl("check_and_norm", TORCH_BOX(&ak::run_check_and_norm));
  m.impl("_check_and_norm_table", TORCH_BOX(&ak::run_check_and_norm_table));
}
