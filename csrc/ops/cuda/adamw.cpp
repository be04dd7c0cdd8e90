// adamw_ on CUDA: checks, memory, launch of kernels/adamw.cu.
#include "kernels/adamw.h"

#include "ops/cuda/arguments.h"
#include "ops/update_arguments.h"

namespace ak {
namespace {

constexpr const char* kOp = "adamw_";

AdamWTensor tensor_of(const UpdateParam& p) {
  AdamWTensor t{};
  t.param = p.param.data;
  t.grad = p.grad.data;
  t.numel = p.numel;
  t.param_dtype = dtype_of(p.param.dtype);
  t.grad_dtype = dtype_of(p.grad.dtype);
  t.exp_avg = p.moments[0].data;
  t.exp_avg_sq = p.moments[1].data;
  t.exp_avg_dtype = dtype_of(p.moments[0].dtype);
  t.exp_avg_sq_dtype = dtype_of(p.moments[1].dtype);
  t.step = p.step;
  t.master_kind = !p.master.data                        ? Master::kNone
                  : p.master.dtype == ScalarType::Short ? Master::kSplit
                                                        : Master::kFloat32;
  t.master = p.master.data;
  t.shadow = p.shadow.data;
  t.shadow_dtype = dtype_of(p.shadow.dtype);
  t.group = static_cast<int>(p.group);
  return t;
}

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
  std::vector<AdamWTensor> tensors;
  tensors.reserve(params.size());
  for (const UpdateParam& p :
       check_update_arguments(arguments, static_cast<int64_t>(lr.size()),
                              [&](ArgName name, const Tensor& t) { call.check_place(name, t); })) {
    tensors.push_back(tensor_of(p));
  }
  std::vector<AdamWGroup> groups;
  for (size_t g = 0; g < lr.size(); ++g) {
    groups.push_back({{lr[g], beta1[g], beta2[g], eps[g], weight_decay[g], (flags[g] & kCoupledDecay) != 0},
                      lrs.empty() ? nullptr : static_cast<const float*>(lrs[g].const_data_ptr()),
                      (flags[g] & kMaximize) != 0});
  }
  const StepDecisions decisions{call.scalar({"grad_scale"}, grad_scale), call.scalar({"found_inf"}, found_inf),
                                call.scalar({"sum_sq"}, sum_sq), static_cast<float>(max_norm)};
  const Tensor scratch = call.scratch(adamw_scratch_bytes(tensors.size()));
  call.check(adamw(tensors, groups, decisions, scratch.mutable_data_ptr(), call.stream()));
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CUDA, m) { m.impl("adamw_", TORCH_BOX(&ak::run_adamw)); }
