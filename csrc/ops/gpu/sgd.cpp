// sgd_ on a GPU: checks, memory, launch of kernels/sgd.cu.
#include "kernels/sgd.h"

#include "ops/gpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "sgd_";

void run_sgd(const TensorList params, const TensorList grads, const TensorList momentum_buffers, const TensorList steps,
             const TensorList masters, const TensorList shadows, const TensorList emas, const Tensor layout,
             const TensorList lrs, const std::optional<Tensor> grad_scale, const std::optional<Tensor> found_inf,
             const std::optional<Tensor> sum_sq, const std::vector<double> lr, const std::vector<double> momentum,
             const std::vector<double> dampening, const std::vector<double> weight_decay,
             const std::vector<double> ema_decay, const std::vector<int64_t> flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"momentum", momentum.size()},
                {"dampening", dampening.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors arguments{kOp,    params,  grads,      {{"momentum_buffers", &momentum_buffers, false}},
                                steps,  masters, shadows,    emas,
                                layout, lrs,     grad_scale, found_inf,
                                sum_sq};
  take_step<SgdOptions>(
      arguments, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g) {
        return SgdOptions{lr[g], momentum[g], dampening[g], weight_decay[g], (flags[g] & kNesterov) != 0};
      },
      sgd_scratch_bytes, [](const auto&... arguments) { return sgd(arguments...); });
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("sgd_", TORCH_BOX(&ak::run_sgd)); }
