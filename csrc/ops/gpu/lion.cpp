// lion_ on a GPU: checks, memory, launch of kernels/lion.cu.
#include "kernels/lion.h"

#include "ops/gpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "lion_";

void run_lion(const TensorList params, const TensorList grads, const TensorList exp_avgs, const TensorList steps,
              const TensorList masters, const TensorList shadows, const TensorList emas, const Tensor layout,
              const TensorList lrs, const std::optional<Tensor> grad_scale, const std::optional<Tensor> found_inf,
              const std::optional<Tensor> sum_sq, const std::vector<double> lr, const std::vector<double> beta1,
              const std::vector<double> beta2, const std::vector<double> weight_decay,
              const std::vector<double> ema_decay, const std::vector<int64_t> flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"beta1", beta1.size()},
                {"beta2", beta2.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors arguments{
      kOp,        params,    grads, {{"exp_avgs", &exp_avgs}}, steps, masters, shadows, emas, layout, lrs,
      grad_scale, found_inf, sum_sq};
  take_step<LionOptions>(
      arguments, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g) { return LionOptions{lr[g], beta1[g], beta2[g], weight_decay[g]}; }, lion_scratch_bytes,
      [](const auto&... arguments) { return lion(arguments...); });
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("lion_", TORCH_BOX(&ak::run_lion)); }
