// sgd_: one SGD step of a list of parameters, by the formula of math/sgd.h.
//
// Whether a momentum buffer holds history is known from the parameter's own step count, not from the optimizer's: a
// step that an overflow skipped leaves the count, and so the next one starts the buffer.
#include "math/sgd.h"

#include "ops/cpu/update.h"

namespace ak {
namespace {

constexpr const char* kOp = "sgd_";

AK_SIMD_CLONES void plain_span(float* __restrict p, const float* __restrict g, int64_t n, float inv_scale, float clip,
                               const SgdScalars scalars) {
  for (int64_t i = 0; i < n; ++i) sgd(p[i], effective_grad(g[i], inv_scale, clip), scalars);
}

AK_SIMD_CLONES void momentum_span(float* __restrict p, float* __restrict buffer, const float* __restrict g, int64_t n,
                                  float inv_scale, float clip, const SgdScalars scalars) {
  for (int64_t i = 0; i < n; ++i) sgd_momentum(p[i], buffer[i], effective_grad(g[i], inv_scale, clip), scalars);
}

void sgd_(const TensorList& params, const TensorList& grads, const TensorList& momentum_buffers,
          const TensorList& steps, const TensorList& masters, const TensorList& shadows, const TensorList& emas,
          const Tensor& layout, const TensorList& lrs, const std::optional<Tensor>& grad_scale,
          const std::optional<Tensor>& found_inf, const std::optional<Tensor>& sum_sq, const std::vector<double>& lr,
          const std::vector<double>& momentum, const std::vector<double>& dampening,
          const std::vector<double>& weight_decay, const std::vector<double>& ema_decay,
          const std::vector<int64_t>& flags, double max_norm, int64_t seed) {
  check_groups(kOp, lr.size(),
               {{"momentum", momentum.size()},
                {"dampening", dampening.size()},
                {"weight_decay", weight_decay.size()},
                {"ema_decay", ema_decay.size()},
                {"flags", flags.size()}});
  const UpdateTensors tensors{kOp,    params,  grads,      {{"momentum_buffers", &momentum_buffers, false}},
                              steps,  masters, shadows,    emas,
                              layout, lrs,     grad_scale, found_inf,
                              sum_sq};
  take_step(
      tensors, {lr, ema_decay, flags, max_norm, seed},
      [&](size_t g, double rate, float step) {
        return sgd_scalars({rate, momentum[g], dampening[g], weight_decay[g], (flags[g] & kNesterov) != 0}, step);
      },
      [](float* p, const float* g, float* const* moments, int64_t n, float inv_scale, float clip, const SgdScalars& s) {
        if (moments[0]) {
          momentum_span(p, moments[0], g, n, inv_scale, clip, s);
        } else {
          plain_span(p, g, n, inv_scale, clip, s);
        }
      });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("sgd_", TORCH_BOX(&ak::sgd_)); }
