// adamw_ on CUDA: checks, memory, launch of kernels/adamw.cu.
#include "kernels/adamw.h"

#include "ops/cuda/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "adamw_";

void run_adamw(const TensorList params, const TensorList grads, const TensorList exp_avgs, const TensorList exp_avg_sqs,
               const TensorList steps, const TensorList masters, const TensorList shadows, const Tensor layout,
               const TensorList lrs, const std::optional<Tensor> grad_scale, const std::optional<Tensor> found_inf,
               const std::optional<Tensor> sum_sq, const std::vector<double> lr, const std::vector<double> beta1,
               const std::vector<double> beta2, const std::vector<double> eps, const std::vector<double> weight_decay,
               const std::vector<int64_t> flags, double max_norm) {
  if (params.empty()) return;
  check_groups(kOp, "beta1", beta1.size(), lr.size());
  check_groups(kOp, "beta2", beta2.size(), lr.size());
  check_groups(kOp, "eps", eps.size(), lr.size());
  check_groups(kOp, "weight_decay", weight_decay.size(), lr.size());
  check_groups(kOp, "flags", flags.size(), lr.size());
  const CudaCall call(kOp, {"params", 0}, params[0]);
  const UpdateTensors arguments{kOp,    params, grads,      {{"exp_avgs", &exp_avgs}, {"exp_avg_sqs", &exp_avg_sqs}},
                                true,   steps,  masters,    shadows,
                                layout, lrs,    grad_scale, found_inf,
                                sum_sq};
  const std::vector<ParamState> states = check_update(call, arguments, lr.size());
  std::vector<AdamWGroup> groups;
  for (size_t g = 0; g < lr.size(); ++g) {
    const AdamWOptions options{lr[g], beta1[g], beta2[g], eps[g], weight_decay[g], (flags[g] & kCoupledDecay) != 0};
    groups.push_back(param_group(options, lrs, g, flags[g]));
  }
  const StepDecisions decisions = step_decisions(call, arguments, max_norm);
  const Tensor scratch = call.scratch(adamw_scratch_bytes(states.size()));
  call.check(adamw(states, groups, decisions, scratch.mutable_data_ptr(), call.stream()));
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { m.impl("adamw_", TORCH_BOX(&ak::run_adamw)); }
