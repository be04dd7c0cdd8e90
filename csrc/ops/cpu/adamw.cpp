// adamw_: one AdamW (or Adam) step of a list of parameters, by the formula of math/adamw.h.
#include "math/adamw.h"

#include "ops/cpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "adamw_";

AK_SIMD_CLONES void update_span(float* __restrict p, float* __restrict m, float* __restrict v,
                                const float* __restrict g, int64_t n, float inv_scale, float clip,
                                const AdamWScalars scalars) {
  for (int64_t i = 0; i < n; ++i) adamw(p[i], m[i], v[i], effective_grad(g[i], inv_scale, clip), scalars);
}

AK_SIMD_CLONES void amsgrad_span(float* __restrict p, float* __restrict m, float* __restrict v, float* __restrict v_max,
                                 const float* __restrict g, int64_t n, float inv_scale, float clip,
                                 const AdamWScalars scalars) {
  for (int64_t i = 0; i < n; ++i) {
    amsgrad(p[i], m[i], v[i], v_max[i], effective_grad(g[i], inv_scale, clip), scalars);
  }
}

void adamw_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
            const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs, const TensorList& steps,
            const TensorList& masters, const TensorList& shadows, const TensorList& emas, const Tensor& layout,
            const TensorList& lrs, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
            const std::optional<Tensor>& sum_sq, const std::vector<double>& lr, const std::vector<double>& beta1,
            const std::vector<double>& beta2, const std::vector<double>& eps, const std::vector<double>& weight_decay,
            const std::vector<double>& ema_decay, const std::vector<int64_t>& flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"beta1", beta1.size()},
                {"beta2", beta2.size()},
                {"eps", eps.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors tensors{
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
  take_step(
      tensors, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g, double rate, float step) {
        return adamw_scalars({rate, beta1[g], beta2[g], eps[g], weight_decay[g], (flags[g] & kCoupledDecay) != 0},
                             step);
      },
      [](float* p, const float* g, float* const* moments, int64_t n, float inv_scale, float clip,
         const AdamWScalars& s) {
        if (moments[2]) {
          amsgrad_span(p, moments[0], moments[1], moments[2], g, n, inv_scale, clip, s);
        } else {
          update_span(p, moments[0], moments[1], g, n, inv_scale, clip, s);
        }
      });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("adamw_", TORCH_BOX(&ak::adamw_)); }
