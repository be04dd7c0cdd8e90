// sgd_: one SGD step of a list of parameters, by the formula of math/sgd.h.
//
// Everything is checked and every decision made before the first write; then the parameters are walked once, in tiles.
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
          const TensorList& steps, const TensorList& masters, const TensorList& shadows, const Tensor& layout,
          const TensorList& lrs, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
          const std::optional<Tensor>& sum_sq, const std::vector<double>& lr, const std::vector<double>& momentum,
          const std::vector<double>& dampening, const std::vector<double>& weight_decay,
          const std::vector<int64_t>& flags, double max_norm) {
  check_groups(kOp, "momentum", momentum.size(), lr.size());
  check_groups(kOp, "dampening", dampening.size(), lr.size());
  check_groups(kOp, "weight_decay", weight_decay.size(), lr.size());
  check_groups(kOp, "flags", flags.size(), lr.size());
  const UpdateTensors tensors{kOp,    params, grads,      {{"momentum_buffers", &momentum_buffers}},
                              false,  steps,  masters,    shadows,
                              layout, lrs,    grad_scale, found_inf,
                              sum_sq};
  const std::vector<UpdateParam> work = check_update(tensors, static_cast<int64_t>(lr.size()));
  const UpdateDecision step = decide(tensors, max_norm);
  if (step.skip) return;

  std::vector<SgdScalars> scalars;
  scalars.reserve(work.size());
  for (const UpdateParam& p : work) {
    const size_t g = static_cast<size_t>(p.group);
    *p.step += 1.0f;
    scalars.push_back(sgd_scalars(
        {learning_rate(lrs, lr, p.group), momentum[g], dampening[g], weight_decay[g], (flags[g] & kNesterov) != 0},
        *p.step));
  }
  for_each_tile(work, [&](int64_t i, float* p, const float* g, float* buffer, float*, int64_t n) {
    const size_t k = static_cast<size_t>(i);
    const float clip = flags[static_cast<size_t>(work[k].group)] & kMaximize ? -step.clip : step.clip;
    if (buffer) {
      momentum_span(p, buffer, g, n, step.inv_scale, clip, scalars[k]);
    } else {
      plain_span(p, g, n, step.inv_scale, clip, scalars[k]);
    }
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("sgd_", TORCH_BOX(&ak::sgd_)); }
