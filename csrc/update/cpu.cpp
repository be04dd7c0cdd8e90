#include "update/cpu.h"

#include "update/cpu_stochastic.h"

namespace ak {

UpdateDecision decide(const UpdateArguments& a) {
  const auto read = [&](const char* name, const std::optional<Tensor>& value, float otherwise) {
    return value ? read_scalar<float>(a.op, {name}, *value) : otherwise;
  };
  const float scale = read("grad_scale", a.grad_scale, 1.0f);
  const float found_inf = read("found_inf", a.found_inf, 0.0f);
  const float sum_sq = read("sum_sq", a.sum_sq, 0.0f);
  const float clip = a.sum_sq ? clip_factor(sum_sq, static_cast<float>(a.max_norm)) : 1.0f;
  return {found(found_inf), inverse_scale(scale), clip};
}

float* load_weights(const UpdateParam& p, int64_t at, int64_t n, float* buffer) {
  if (!p.master.data) return load_tile(p.param.data, dtype_of(p.param.dtype), at, n, buffer);
  if (p.master.dtype == ScalarType::Float) return load_tile(p.master.data, dtype_of(p.master.dtype), at, n, buffer);
  const int16_t* remainder = reinterpret_cast<const int16_t*>(p.master.data) + at;
  if (p.param.dtype == ScalarType::Half) {
    join_span(reinterpret_cast<const fp16*>(p.param.data) + at, remainder, buffer, n);
  } else {
    join_span(reinterpret_cast<const bf16*>(p.param.data) + at, remainder, buffer, n);
  }
  return buffer;
}

namespace {

AK_SIMD_CLONES void ema_span(float* __restrict average, const float* __restrict weight, int64_t n, float take) {
  for (int64_t i = 0; i < n; ++i) average[i] = ema(average[i], weight[i], take);
}

}  // namespace

void store_weights(const UpdateParam& p, const float* weights, int64_t at, int64_t n, const Rounding& r) {
  if (p.master.data && p.master.dtype == ScalarType::Short) {
    int16_t* remainder = reinterpret_cast<int16_t*>(p.master.data) + at;
    if (p.param.dtype == ScalarType::Half) {
      split_span(weights, reinterpret_cast<fp16*>(p.param.data) + at, remainder, n);
    } else {
      split_span(weights, reinterpret_cast<bf16*>(p.param.data) + at, remainder, n);
    }
    return;
  }
  if (r.stochastic && !p.master.data && is_half(p.param.dtype)) {
    store_stochastic(weights, p.param.data, dtype_of(p.param.dtype), at, n, {r.seed, r.step, p.index});
  } else {
    store_tile(weights, p.param.data, dtype_of(p.param.dtype), at, n);
  }
  if (p.shadow.data) store_tile(weights, p.shadow.data, dtype_of(p.shadow.dtype), at, n);
}

void update_ema(const UpdateParam& p, const float* weights, int64_t at, int64_t n, float take) {
  ema_span(reinterpret_cast<float*>(p.ema.data) + at, weights, n, take);
}

}  // namespace ak
