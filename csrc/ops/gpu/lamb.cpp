// lamb_ on a GPU: checks, memory, launch of kernels/lamb.cu.
#include "kernels/lamb.h"

#include "ops/gpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "lamb_";

void run_lamb(const TensorList params, const TensorList grads, const TensorList exp_avgs, const TensorList exp_avg_sqs,
              const TensorList steps, const TensorList masters, const TensorList shadows, const TensorList emas,
              const Tensor layout, const TensorList lrs, const std::optional<Tensor> grad_scale,
              const std::optional<Tensor> found_inf, const std::optional<Tensor> sum_sq, const std::vector<double> lr,
              const std::vector<double> beta1, const std::vector<double> beta2, const std::vector<double> eps,
              const std::vector<double> weight_decay, const std::vector<double> ema_decay,
              const std::vector<int64_t> flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"beta1", beta1.size()},
                {"beta2", beta2.size()},
                {"eps", eps.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors arguments{kOp,    params,  grads,      {{"exp_avgs", &exp_avgs}, {"exp_avg_sqs", &exp_avg_sqs}},
                                steps,  masters, shadows,    emas,
                                layout, lrs,     grad_scale, found_inf,
                                sum_sq};
  take_step<LambOptions>(
      arguments, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g) {
        return LambOptions{lr[g],
                           beta1[g],
                           beta2[g],
                           eps[g],
                           weight_decay[g],
                           (flags[g] & kNoBiasCorrection) == 0,
                           (flags[g] & kAdaptAll) != 0};
      },
      lamb_scratch_bytes, [](const auto&... arguments) { return lamb(arguments...); });
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("lamb_", TORCH_BOX(&ak::run_lamb)); }
