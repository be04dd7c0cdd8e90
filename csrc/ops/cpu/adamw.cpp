// adamw_: one AdamW (or Adam) step of a list of parameters, by the formula of math/adamw.h.
//
// Everything is checked and every decision made before the first write; then the parameters are walked once, in tiles:
// gradients are read once, weights and moments read and written once.
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

void adamw_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
            const TensorList& exp_avg_sqs, const TensorList& steps, const TensorList& masters,
            const TensorList& shadows, const Tensor& layout, const TensorList& lrs,
            const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
            const std::optional<Tensor>& sum_sq, const std::vector<double>& lr, const std::vector<double>& beta1,
            const std::vector<double>& beta2, const std::vector<double>& eps, const std::vector<double>& weight_decay,
            const std::vector<int64_t>& flags, double max_norm) {
  check_groups(kOp, "beta1", beta1.size(), lr.size());
  check_groups(kOp, "beta2", beta2.size(), lr.size());
  check_groups(kOp, "eps", eps.size(), lr.size());
  check_groups(kOp, "weight_decay", weight_decay.size(), lr.size());
  check_groups(kOp, "flags", flags.size(), lr.size());
  const UpdateTensors tensors{kOp,    params, grads,      {{"exp_avgs", &exp_avgs}, {"exp_avg_sqs", &exp_avg_sqs}},
                              true,   steps,  masters,    shadows,
                              layout, lrs,    grad_scale, found_inf,
                              sum_sq};
  const std::vector<UpdateParam> work = check_update(tensors, static_cast<int64_t>(lr.size()));
  const UpdateDecision step = decide(tensors, max_norm);
  if (step.skip) return;

  std::vector<AdamWScalars> scalars;
  scalars.reserve(work.size());
  for (const UpdateParam& p : work) {
    const size_t g = static_cast<size_t>(p.group);
    *p.step += 1.0f;
    scalars.push_back(adamw_scalars(
        {learning_rate(lrs, lr, p.group), beta1[g], beta2[g], eps[g], weight_decay[g], (flags[g] & kCoupledDecay) != 0},
        *p.step));
  }
  for_each_tile(work, [&](int64_t i, float* p, const float* g, float* m, float* v, int64_t n) {
    const size_t k = static_cast<size_t>(i);
    const float clip = flags[static_cast<size_t>(work[k].group)] & kMaximize ? -step.clip : step.clip;
    update_span(p, m, v, g, n, step.inv_scale, clip, scalars[k]);
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("adamw_", TORCH_BOX(&ak::adamw_)); }
