// The update ops on the CPU: storage of weights, and the registration of the rules without a stage.
#include "update/cpu.h"

#include "update/rules.h"

namespace ak {

StepValues read_scalars(const UpdateCall& call) {
  const auto read = [&](const char* name, const std::optional<Tensor>& value, float otherwise) {
    return value ? read_scalar<float>(call.op(), {name}, *value) : otherwise;
  };
  const float scale = read("grad_scale", call.grad_scale, 1.0f);
  const float found_inf = read("found_inf", call.found_inf, 0.0f);
  const float sum_sq = read("sum_sq", call.sum_sq, 0.0f);
  const float clip = call.sum_sq ? clip_factor(sum_sq, static_cast<float>(call.max_norm)) : 1.0f;
  const float* factors = call.factors ? static_cast<const float*>(call.factors->const_data_ptr()) : nullptr;
  return {found(found_inf), inverse_scale(scale), clip, factors};
}

namespace {

// f of a value of the type of fp16 or bf16.
template <typename F>
void with_half(DType dtype, const F& f) {
  if (dtype == DType::kFloat16) {
    f(fp16{});
  } else {
    f(bf16{});
  }
}

AK_SIMD_CLONES void ema_span(float* __restrict average, const float* __restrict weight, int64_t n, float take) {
  for (int64_t i = 0; i < n; ++i) average[i] = ema(average[i], weight[i], take);
}

}  // namespace

float* load_weights(const Param& p, int64_t at, int64_t n, float* buffer) {
  if (p.master_kind == Master::kNone) return load_tile(p.param, p.param_dtype, at, n, buffer);
  if (p.master_kind == Master::kFloat32) return static_cast<float*>(p.master) + at;
  with_half(p.param_dtype, [&]<typename T>(T) {
    const T* weight = static_cast<const T*>(p.param) + at;
    if (p.master_kind == Master::kSplit) {
      join_span(weight, static_cast<const int16_t*>(p.master) + at, buffer, n);
    } else {
      join_span(weight, static_cast<const int8_t*>(p.master) + at, buffer, n);
    }
  });
  return buffer;
}

void store_weights(const Param& p, const float* weights, int64_t at, int64_t n, TileNumbers& numbers) {
  if (p.master_kind == Master::kSplit) {
    with_half(p.param_dtype, [&]<typename T>(T) {
      split_span(weights, static_cast<T*>(p.param) + at, static_cast<int16_t*>(p.master) + at, n);
    });
    return;
  }
  if (p.master_kind == Master::kSplit24) {
    const uint16_t* random = numbers.of(0);
    with_half(p.param_dtype, [&]<typename T>(T) {
      split24_span(weights, random, static_cast<T*>(p.param) + at, static_cast<int8_t*>(p.master) + at, n);
    });
    return;
  }
  if (p.stochastic && p.master_kind == Master::kNone && p.param_dtype != DType::kFloat32) {
    store_stochastic(weights, p.param, p.param_dtype, at, n, numbers);
  } else {
    store_tile(weights, p.param, p.param_dtype, at, n);
  }
  if (p.shadow) store_tile(weights, p.shadow, p.shadow_dtype, at, n);
}

void update_ema(const Param& p, const float* weights, int64_t at, int64_t n, float take) {
  ema_span(p.ema + at, weights, n, take);
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  ak::for_each_rule([&]<typename Rule>(Rule) {
    if constexpr (!ak::kHasStage<Rule>) ak::register_update<Rule, ak::take_step<Rule>>(m);
  });
}
