// sgd_ on CUDA: checks, memory, launch of kernels/sgd.cu.
#include "kernels/sgd.h"

#include "ops/cuda/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "sgd_";

void run_sgd(const TensorList params, const TensorList grads, const TensorList momentum_buffers, const TensorList steps,
             const TensorList masters, const TensorList shadows, const Tensor layout, const TensorList lrs,
             const std::optional<Tensor> grad_scale, const std::optional<Tensor> found_inf,
             const std::optional<Tensor> sum_sq, const std::vector<double> lr, const std::vector<double> momentum,
             const std::vector<double> dampening, const std::vector<double> weight_decay,
             const std::vector<int64_t> flags, double max_norm) {
  if (params.empty()) return;
  check_groups(kOp, "momentum", momentum.size(), lr.size());
  check_groups(kOp, "dampening", dampening.size(), lr.size());
  check_groups(kOp, "weight_decay", weight_decay.size(), lr.size());
  check_groups(kOp, "flags", flags.size(), lr.size());
  const CudaCall call(kOp, {"params", 0}, params[0]);
  const UpdateTensors arguments{kOp,    params, grads,      {{"momentum_buffers", &momentum_buffers}},
                                false,  steps,  masters,    shadows,
                                layout, lrs,    grad_scale, found_inf,
                                sum_sq};
  const std::vector<ParamState> states = check_update(call, arguments, lr.size());
  std::vector<SgdGroup> groups;
  for (size_t g = 0; g < lr.size(); ++g) {
    const SgdOptions options{lr[g], momentum[g], dampening[g], weight_decay[g], (flags[g] & kNesterov) != 0};
    groups.push_back(param_group(options, lrs, g, flags[g]));
  }
  const StepDecisions decisions = step_decisions(call, arguments, max_norm);
  const Tensor scratch = call.scratch(sgd_scratch_bytes(states.size()));
  call.check(sgd(states, groups, decisions, scratch.mutable_data_ptr(), call.stream()));
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { m.impl("sgd_", TORCH_BOX(&ak::run_sgd)); }
