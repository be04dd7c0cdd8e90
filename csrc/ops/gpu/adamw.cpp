// adamw_ on a GPU: checks, memory, launch of kernels/adamw.cu.
#include "kernels/adamw.h"

#include "ops/gpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "adamw_";

void run_adamw(const TensorList params, const TensorList grads, const TensorList exp_avgs, const TensorList exp_avg_sqs,
               const TensorList max_exp_avg_sqs, const TensorList steps, const TensorList masters,
               const TensorList shadows, const TensorList emas, const Tensor layout, const TensorList lrs,
               const std::optional<Tensor> grad_scale, const std::optional<Tensor> found_inf,
               const std::optional<Tensor> sum_sq, const std::vector<double> lr, const std::vector<double> beta1,
               const std::vector<double> beta2, const std::vector<double> eps, const std::vector<double> weight_decay,
               const std::vector<double> ema_decay, const std::vector<int64_t> flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"beta1", beta1.size()},
                {"beta2", beta2.size()},
                {"eps", eps.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors arguments{
      kOp,
      params,
      grads,
      {{"exp_avgs", &exp_avgs}, {"exp_avg_sqs", &exp_avg_sqs}, {"max_exp_avg_sqs", &max_exp_avg_sqs, false}},
      steps,
      masters,
      shadows,
      emas,
      layout,
      lrs,
      grad_scale,
      found_inf,
      sum_sq};
  take_step<AdamWOptions>(
      arguments, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g) {
        return AdamWOptions{lr[g], beta1[g], beta2[g], eps[g], weight_decay[g], (flags[g] & kCoupledDecay) != 0};
      },
      adamw_scratch_bytes, [](const auto&... arguments) { return adamw(arguments...); });
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("adamw_", TORCH_BOX(&ak::run_adamw)); }
