// A step of any rule (update/rule.h) on the CPU.
//
// Everything is checked and every decision made before the first write. Then the parameters are walked once, in tiles:
// gradients are read once, weights and moments read and written once. A rule with a stage takes two walks.
#pragma once

#include <utility>
#include <vector>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/stochastic.h"
#include "base/cpu/tile.h"
#include "gradients/clip.h"
#include "update/call.h"
#include "update/cpu_moments.h"
#include "update/cpu_plain8.h"
#include "update/ema.h"

namespace ak {

// The values of the scalars that other ops wrote.
struct StepValues {
  bool skip;
  float inv_scale, clip;
  const float* factors;  // in place of `clip`, by parameter, or null
};

StepValues read_scalars(const UpdateCall& call);

// The fp32 weights [at, at + n), to be changed: in place if they are stored in fp32, else in `buffer`.
float* load_weights(const Param& p, int64_t at, int64_t n, float* buffer);

// Writes the weight of parameter, remainder and shadow, rounded.
void store_weights(const Param& p, const float* weights, int64_t at, int64_t n, TileNumbers& numbers);

// Moves the fp32 averages [at, at + n) of the parameter towards its new weights.
void update_ema(const Param& p, const float* weights, int64_t at, int64_t n, float take);

// Cuts the parameters into chunks and tiles and calls, for each tile and on several threads, update(index of the
// parameter, its weights, its gradients, first element, n, random numbers), which loads and stores the moments, and
// then finish(index of the parameter, its weights, first element, n, random numbers). The tiles of a chunk come in
// order, on one thread. `key_of(index of the parameter)`: of the random numbers.
template <typename KeyOf, typename Update, typename Finish>
void for_each_tile(const std::vector<Param>& params, const KeyOf& key_of, const Update& update, const Finish& finish) {
  for_each_chunk(make_chunks(params), [&](int64_t, const Chunk& chunk) {
    alignas(64) float buffers[2][kTile];
    const Param& p = params[static_cast<size_t>(chunk.tensor)];
    for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
      const int64_t n = std::min(kTile, chunk.end - at);
      float* weights = load_weights(p, at, n, buffers[0]);
      const float* grads = load_tile(p.grad, p.grad_dtype, at, n, buffers[1]);
      TileNumbers numbers(key_of(chunk.tensor), at, n);
      update(chunk.tensor, weights, grads, at, n, numbers);
      finish(chunk.tensor, weights, at, n, numbers);
    }
  });
}

// Shared by the elements of one parameter in one step.
template <typename Rule>
struct SharedByParam {
  typename Rule::Scalars scalars;
  float clip;  // negative when maximizing
  float ema_take;
  uint32_t step;
};

// The key of a parameter's random numbers, by its position.
template <typename Rule>
struct KeyOf {
  const std::vector<Param>& params;
  const std::vector<SharedByParam<Rule>>& shared;
  uint64_t seed;

  RandomKey operator()(int64_t index) const {
    const size_t i = static_cast<size_t>(index);
    return {seed, shared[i].step, params[i].random};
  }
};

// Counts the step of every parameter and derives what its elements share. A parameter that stays loses its elements.
template <typename Rule>
std::vector<SharedByParam<Rule>> begin_step(std::vector<Param>& params, const UpdateCall& call,
                                            const StepValues& step) {
  std::vector<typename Rule::Options> options;
  options.reserve(call.flags.size());
  for (size_t group = 0; group < call.flags.size(); ++group) {
    options.push_back(call.options_of<Rule>(group));
    if (!call.lrs.empty()) options.back().lr = *static_cast<const float*>(call.lrs[group].const_data_ptr());
    if (!call.weight_decays.empty()) {
      options.back().weight_decay = *static_cast<const double*>(call.weight_decays[group].const_data_ptr());
    }
  }
  std::vector<SharedByParam<Rule>> shared;
  shared.reserve(params.size());
  const Param* last = nullptr;
  for (Param& p : params) {
    const size_t group = static_cast<size_t>(p.group);
    const float clip = step.factors ? step.factors[shared.size()] : step.clip;
    if (leaves(clip)) {
      p.numel = 0;
      last = nullptr;
      shared.push_back({});
      continue;
    }
    *p.step += 1.0f;
    // The scalars take powers of doubles: recomputed only where group or step changes.
    const bool known = last != nullptr && last->group == p.group && *last->step == *p.step;
    last = &p;
    shared.push_back({known ? shared.back().scalars : Rule::scalars(options[group], *p.step),
                      call.flags[group] & kMaximize ? -clip : clip, ema_take(call.ema_decay[group]),
                      static_cast<uint32_t>(*p.step)});
  }
  return shared;
}

// The formula over a tile, with the moments that are present. They are arguments of their own, not an array, so that
// the compiler knows that they do not overlap.
template <typename Rule, bool kOptional, typename... Moment>
AK_SIMD_CLONES void update_span(int64_t n, float inv_scale, float clip, const typename Rule::Scalars scalars,
                                const float* __restrict g, float* __restrict p, Moment* __restrict... moments) {
  for (int64_t i = 0; i < n; ++i) {
    float weight = p[i], of_element[Rule::kMoments] = {};
    int m = 0;
    ((of_element[m++] = moments[i]), ...);
    Rule::update(weight, of_element, kOptional, effective_grad(g[i], inv_scale, clip), scalars);
    p[i] = weight;
    m = 0;
    ((moments[i] = of_element[m++]), ...);
  }
}

template <typename Rule, bool kOptional, typename... Arguments>
void update_moments(float* const* moments, const Arguments&... arguments) {
  [&]<size_t... k>(std::index_sequence<k...>) {
    update_span<Rule, kOptional>(arguments..., moments[k]...);
  }(std::make_index_sequence<kOptional ? Rule::kMoments : Rule::kRequiredMoments>{});
}

// A tile with its moments.
template <typename Rule, bool kOptional>
void update_tile(const Param& p, const SharedByParam<Rule>& shared, float inv_scale, float* weights, const float* grads,
                 int64_t at, int64_t n, TileNumbers& numbers) {
  const auto general = [&](int64_t first, int64_t count) __attribute__((noinline)) {
    TileMoments<Rule> moments;
    moments.load(p, at + first, count);
    update_moments<Rule, kOptional>(moments.of, count, inv_scale, shared.clip, shared.scalars, grads + first,
                                    weights + first);
    if constexpr (!kHasStage<Rule>) moments.store(p, at + first, count, first, numbers);
  };
  int64_t done = 0;
#if AK_HAS_PLAIN8
  if constexpr (!kHasStage<Rule> && (kOptional || Rule::kRequiredMoments > 0)) {
    if (p.in_8_bits() && vector_bits() > 128) {
      done = plain8::update<Rule, kOptional>(p, at, n, weights, grads, numbers, shared.scalars, inv_scale, shared.clip,
                                             general);
    }
  }
#endif
  if (done < n) general(done, n - done);
}

// The first walk of a rule with a stage and what it computes from whole tensors. Specialized in update/rules/cpu_X.cpp,
// which also registers the rule.
template <typename Rule>
void run_stage(const std::vector<Param>& params, std::vector<SharedByParam<Rule>>& shared, float inv_scale,
               uint64_t seed, const StepHalf& half);

// One step, or none if it is to be skipped.
template <typename Rule>
void take_step(const UpdateCall& call) {
  std::vector<Param> params =
      checked_params<Rule>(call, [&](ArgName name, const Tensor& tensor) { check_cpu(call.op(), name, tensor); });
  const StepValues step = read_scalars(call);
  if (step.skip) return;
  auto shared = begin_step<Rule>(params, call, step);
  if constexpr (kHasStage<Rule>) {
    run_stage<Rule>(params, shared, step.inv_scale, static_cast<uint64_t>(call.seed), call.half());
    if (!call.second) return;
  }
  for_each_tile(
      params, KeyOf<Rule>{params, shared, static_cast<uint64_t>(call.seed)},
      [&](int64_t index, float* weights, const float* grads, int64_t at, int64_t n, TileNumbers& numbers) {
        const size_t i = static_cast<size_t>(index);
        const bool optional = Rule::kMoments > Rule::kRequiredMoments && params[i].moments[Rule::kMoments - 1];
        const auto update = optional ? update_tile<Rule, true> : update_tile<Rule, false>;
        update(params[i], shared[i], step.inv_scale, weights, grads, at, n, numbers);
      },
      [&](int64_t index, const float* weights, int64_t at, int64_t n, TileNumbers& numbers) {
        const size_t i = static_cast<size_t>(index);
        if (params[i].ema) update_ema(params[i], weights, at, n, shared[i].ema_take);
        store_weights(params[i], weights, at, n, numbers);
      });
}

}  // namespace ak
