// check_and_norm(grads, grad_scale) -> (sum of squares, found_inf) on CUDA: checks, memory, launch of
// kernels/check_and_norm.cu.
#include "kernels/check_and_norm.h"

#include "ops/cuda/arguments.h"

namespace ak {
namespace {

constexpr const char* kOp = "check_and_norm";

std::tuple<Tensor, Tensor> run_check_and_norm(const TensorList grads, const std::optional<Tensor> grad_scale) {
  AK_CHECK(!grads.empty(), kOp, ": grads must not be empty");
  const CudaCall call(kOp, {"grads", 0}, grads[0]);
  const std::vector<GradRef> refs = call.grad_refs<const void>(grads);
  const float* scale = call.scalar({"grad_scale"}, grad_scale);

  const Tensor sum_sq = call.empty({}, ScalarType::Float), found_inf = call.empty({}, ScalarType::Float);
  const Tensor scratch = call.scratch(check_and_norm_scratch_bytes(refs));
  STD_CUDA_CHECK(
      cudaMemsetAsync(scratch.mutable_data_ptr(), 0, kNormScratchZeroed, static_cast<cudaStream_t>(call.stream())));
  call.check(check_and_norm(refs, scale, scratch.mutable_data_ptr(), static_cast<float*>(sum_sq.mutable_data_ptr()),
                            static_cast<float*>(found_inf.mutable_data_ptr()), call.stream()));
  return {sum_sq, found_inf};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { m.impl("check_and_norm", TORCH_BOX(&ak::run_check_and_norm)); }
