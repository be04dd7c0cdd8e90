#include "ops/cpu/update.h"

namespace ak {

std::vector<UpdateParam> check_update(const UpdateTensors& t, int64_t groups) {
  return check_update_arguments(t, groups, [&](ArgName name, const Tensor& tensor) { check_cpu(t.op, name, tensor); });
}

UpdateDecision decide(const UpdateTensors& t, double max_norm) {
  const auto read = [&](const char* name, const std::optional<Tensor>& value, float otherwise) {
    return value ? read_scalar<float>(t.op, {name}, *value) : otherwise;
  };
  const float scale = read("grad_scale", t.grad_scale, 1.0f);
  const float found_inf = read("found_inf", t.found_inf, 0.0f);
  const float sum_sq = read("sum_sq", t.sum_sq, 0.0f);
  return {found(found_inf), inverse_scale(scale), t.sum_sq ? clip_factor(sum_sq, static_cast<float>(max_norm)) : 1.0f};
}

float* load_weights(const UpdateParam& p, int64_t at, int64_t n, float* buffer) {
  if (!p.master.data) return load_tile(p.param.data, p.param.dtype, at, n, buffer);
  if (p.master.dtype == ScalarType::Float) return load_tile(p.master.data, p.master.dtype, at, n, buffer);
  const int16_t* remainder = reinterpret_cast<const int16_t*>(p.master.data) + at;
  if (p.param.dtype == ScalarType::Half) {
    join_span(reinterpret_cast<const fp16*>(p.param.data) + at, remainder, buffer, n);
  } else {
    join_span(reinterpret_cast<const bf16*>(p.param.data) + at, remainder, buffer, n);
  }
  return buffer;
}

void store_weights(const UpdateParam& p, const float* weights, int64_t at, int64_t n) {
  if (p.master.data && p.master.dtype == ScalarType::Short) {
    int16_t* remainder = reinterpret_cast<int16_t*>(p.master.data) + at;
    if (p.param.dtype == ScalarType::Half) {
      split_span(weights, reinterpret_cast<fp16*>(p.param.data) + at, remainder, n);
    } else {
      split_span(weights, reinterpret_cast<bf16*>(p.param.data) + at, remainder, n);
    }
    return;
  }
  store_tile(weights, p.param.data, p.param.dtype, at, n);
  if (p.shadow.data) store_tile(weights, p.shadow.data, p.shadow.dtype, at, n);
}

}  // namespace ak
