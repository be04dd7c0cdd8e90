// A step of any rule (update/rule.h) on the CPU: its decisions, how a weight is kept, and the walk over the parameters.
// The arguments: update/arguments.h.
//
// Everything is checked and every decision made before the first write; then the parameters are walked once, in tiles:
// gradients are read once, weights and moments read and written once.
#pragma once

#include <utility>
#include <vector>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "gradients/clip.h"
#include "update/arguments.h"
#include "update/ema.h"

namespace ak {

// What the step's scalars decide for all parameters.
struct UpdateDecision {
  bool skip;
  float inv_scale, clip;
};

template <typename Rule>
std::vector<UpdateParam> check_update(const UpdateArguments& arguments) {
  return check_update_arguments<Rule>(
      arguments, [&](ArgName name, const Tensor& tensor) { check_cpu(arguments.op, name, tensor); });
}

UpdateDecision decide(const UpdateArguments& arguments);

// The fp32 weights [at, at + n), to be changed: in place where they are stored as such, else in `buffer`.
float* load_weights(const UpdateParam& p, int64_t at, int64_t n, float* buffer);

// Random bits for rounding the weights of a parameter; none: to nearest even.
struct Rounding {
  bool stochastic;
  uint64_t seed;
  uint32_t step;
};

// Writes the changed weights to wherever they are kept, rounded: parameter, remainder, shadow. `at` is a multiple of 8.
void store_weights(const UpdateParam& p, const float* weights, int64_t at, int64_t n, const Rounding& rounding);

// Moves the fp32 averages [at, at + n) of the parameter towards its changed weights.
void update_ema(const UpdateParam& p, const float* weights, int64_t at, int64_t n, float take);

// Cuts the parameters into chunks and tiles and calls, for each tile and on several threads, update(index of the
// parameter, its weights, its gradients, its moments (null where there are none), first element, n) and then
// finish(index of the parameter, its weights, first element, n). The tiles of a chunk come in order, on one thread.
template <typename Update, typename Finish>
void for_each_tile(const std::vector<UpdateParam>& params, const Update& update, const Finish& finish) {
  for_each_chunk(make_chunks(params), [&](int64_t, const Chunk& chunk) {
    constexpr int kMaxMoments = UpdateParam::kMaxMoments;
    alignas(64) float buffers[2 + kMaxMoments][kTile];
    const UpdateParam& p = params[static_cast<size_t>(chunk.tensor)];
    for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
      const int64_t n = std::min(kTile, chunk.end - at);
      float* weights = load_weights(p, at, n, buffers[0]);
      const float* grads = load_tile(p.grad.as_const(), dtype_of(p.grad.dtype), at, n, buffers[1]);
      float* moments[kMaxMoments] = {};
      for (int k = 0; k < kMaxMoments; ++k) {
        if (p.moments[k].data)
          moments[k] = load_tile(p.moments[k].data, dtype_of(p.moments[k].dtype), at, n, buffers[2 + k]);
      }
      update(chunk.tensor, weights, grads, moments, at, n);
      for (int k = 0; k < kMaxMoments; ++k) {
        if (p.moments[k].data) store_tile(moments[k], p.moments[k].data, dtype_of(p.moments[k].dtype), at, n);
      }
      finish(chunk.tensor, weights, at, n);
    }
  });
}

// What the elements of one parameter share in one step.
template <typename Rule>
struct SharedByParam {
  typename Rule::Scalars scalars;
  float clip;  // negative when maximizing
  float ema_take;
  Rounding rounding;
};

// Counts the step of every parameter and derives what its elements share.
template <typename Rule>
std::vector<SharedByParam<Rule>> begin_step(const std::vector<UpdateParam>& work, const UpdateArguments& a,
                                            const UpdateDecision& step) {
  std::vector<typename Rule::Options> options;
  options.reserve(a.flags.size());
  for (size_t group = 0; group < a.flags.size(); ++group) {
    options.push_back(a.options_of<Rule>(group));
    if (!a.lrs.empty()) options.back().lr = *static_cast<const float*>(a.lrs[group].const_data_ptr());
    if (!a.weight_decays.empty()) {
      options.back().weight_decay = *static_cast<const double*>(a.weight_decays[group].const_data_ptr());
    }
  }
  std::vector<SharedByParam<Rule>> shared;
  shared.reserve(work.size());
  const UpdateParam* last = nullptr;
  for (const UpdateParam& p : work) {
    const size_t group = static_cast<size_t>(p.group);
    const int64_t flags = a.flags[group];
    *p.step += 1.0f;
    const bool known = last != nullptr && last->group == p.group && *last->step == *p.step;
    last = &p;
    shared.push_back(
        {known ? shared.back().scalars : Rule::scalars(options[group], *p.step),  // powers of doubles: not for each
         flags & kMaximize ? -step.clip : step.clip,
         ema_take(a.ema_decay[group]),
         {(flags & kStochastic) != 0, static_cast<uint64_t>(a.seed), static_cast<uint32_t>(*p.step)}});
  }
  return shared;
}

// Writes changed weights in every form that is kept of them.
template <typename Shared>
void keep_weights(const UpdateParam& p, const Shared& s, const float* weights, int64_t at, int64_t n) {
  if (p.ema.data) update_ema(p, weights, at, n, s.ema_take);
  store_weights(p, weights, at, n, s.rounding);
}

// The formula over a tile, with the moments that are there. They come as arguments of their own and not as an array, so
// that the compiler may know they do not overlap.
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
void update_tile(float* const* moments, const Arguments&... arguments) {
  [&]<size_t... k>(std::index_sequence<k...>) {
    update_span<Rule, kOptional>(arguments..., moments[k]...);
  }(std::make_index_sequence<kOptional ? Rule::kMoments : Rule::kRequiredMoments>{});
}

// One step, or none if it is to be skipped.
template <typename Rule>
void take_step(const UpdateArguments& arguments) {
  const std::vector<UpdateParam> work = check_update<Rule>(arguments);
  const UpdateDecision step = decide(arguments);
  if (step.skip) return;
  const auto shared = begin_step<Rule>(work, arguments, step);
  for_each_tile(
      work,
      [&](int64_t i, float* p, const float* g, float* const* moments, int64_t, int64_t n) {
        const auto& s = shared[static_cast<size_t>(i)];
        if (Rule::kMoments > Rule::kRequiredMoments && moments[Rule::kMoments - 1]) {
          update_tile<Rule, true>(moments, n, step.inv_scale, s.clip, s.scalars, g, p);
        } else {
          update_tile<Rule, false>(moments, n, step.inv_scale, s.clip, s.scalars, g, p);
        }
      },
      [&](int64_t i, const float* weights, int64_t at, int64_t n) {
        keep_weights(work[static_cast<size_t>(i)], shared[static_cast<size_t>(i)], weights, at, n);
      });
}

}  // namespace ak
