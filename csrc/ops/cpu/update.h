// What all updates share on the CPU: the decisions of a step, how a weight is kept, and the walk over the parameters.
// Their arguments: ops/update_arguments.h.
//
// Everything is checked and every decision made before the first write; then the parameters are walked once, in tiles:
// gradients are read once, weights and moments read and written once.
#pragma once

#include <vector>

#include "math/clip.h"
#include "math/ema.h"
#include "ops/cpu/arguments.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/tile.h"
#include "ops/update_arguments.h"

namespace ak {

// What the step's scalars decide for all parameters.
struct UpdateDecision {
  bool skip;
  float inv_scale, clip;
};

// check_update_arguments for host memory.
std::vector<UpdateParam> check_update(const UpdateTensors& tensors, int64_t groups);

UpdateDecision decide(const UpdateTensors& tensors, double max_norm);

// The group's learning rate: its fp32 tensor if there is one.
inline double learning_rate(const TensorList& lrs, const std::vector<double>& lr, int64_t group) {
  if (lrs.empty()) return lr[static_cast<size_t>(group)];
  return *static_cast<const float*>(lrs[static_cast<size_t>(group)].const_data_ptr());
}

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
  const std::vector<Chunk> chunks =
      make_chunks(static_cast<int64_t>(params.size()), [&](int64_t i) { return params[static_cast<size_t>(i)].numel; });
  for_each_chunk(chunks, [&](int64_t, const Chunk& chunk) {
    constexpr int kMaxMoments = UpdateParam::kMaxMoments;
    alignas(64) float buffers[2 + kMaxMoments][kTile];
    const UpdateParam& p = params[static_cast<size_t>(chunk.tensor)];
    for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
      const int64_t n = std::min(kTile, chunk.end - at);
      float* weights = load_weights(p, at, n, buffers[0]);
      const float* grads = load_tile(p.grad.as_const(), p.grad.dtype, at, n, buffers[1]);
      float* moments[kMaxMoments] = {};
      for (int k = 0; k < kMaxMoments; ++k) {
        if (p.moments[k].data) moments[k] = load_tile(p.moments[k].data, p.moments[k].dtype, at, n, buffers[2 + k]);
      }
      update(chunk.tensor, weights, grads, moments, at, n);
      for (int k = 0; k < kMaxMoments; ++k) {
        if (p.moments[k].data) store_tile(moments[k], p.moments[k].data, p.moments[k].dtype, at, n);
      }
      finish(chunk.tensor, weights, at, n);
    }
  });
}

// What the elements of one parameter share in one step.
template <typename Scalars>
struct SharedByParam {
  Scalars scalars;
  double lr;
  float clip;  // negative when maximizing
  float ema_take;
  Rounding rounding;
};

// Counts the step of every parameter and derives what its elements share. `scalars_of(group, learning rate, step
// count)` are the optimizer's own.
template <typename ScalarsOf>
auto begin_step(const std::vector<UpdateParam>& work, const UpdateTensors& tensors, const UpdateNumbers& numbers,
                const UpdateDecision& step, const ScalarsOf& scalars_of) {
  std::vector<SharedByParam<decltype(scalars_of(size_t{}, 0.0, 0.0f))>> shared;
  shared.reserve(work.size());
  const UpdateParam* last = nullptr;
  for (const UpdateParam& p : work) {
    const size_t group = static_cast<size_t>(p.group);
    const int64_t flags = numbers.flags[group];
    const double lr = learning_rate(tensors.lrs, numbers.lr, p.group);
    *p.step += 1.0f;
    const bool known = last != nullptr && last->group == p.group && *last->step == *p.step;
    last = &p;
    shared.push_back(
        {known ? shared.back().scalars : scalars_of(group, lr, *p.step),  // powers of double precision: not for each
         lr,
         flags & kMaximize ? -step.clip : step.clip,
         ema_take(numbers.ema_decay[group]),
         {(flags & kStochastic) != 0, static_cast<uint64_t>(numbers.seed), static_cast<uint32_t>(*p.step)}});
  }
  return shared;
}

// Writes changed weights in every form that is kept of them.
template <typename Shared>
void keep_weights(const UpdateParam& p, const Shared& s, const float* weights, int64_t at, int64_t n) {
  if (p.ema.data) update_ema(p, weights, at, n, s.ema_take);
  store_weights(p, weights, at, n, s.rounding);
}

// One step, or none if it is to be skipped. `scalars_of` as in begin_step; `update(weights, gradients, moments, n,
// inv_scale, clip, scalars)` is the formula for a tile.
template <typename ScalarsOf, typename Update>
void take_step(const UpdateTensors& tensors, const UpdateNumbers& numbers, const ScalarsOf& scalars_of,
               const Update& update) {
  const std::vector<UpdateParam> work = check_update(tensors, static_cast<int64_t>(numbers.lr.size()));
  const UpdateDecision step = decide(tensors, numbers.max_norm);
  if (step.skip) return;
  const auto shared = begin_step(work, tensors, numbers, step, scalars_of);
  for_each_tile(
      work,
      [&](int64_t i, float* p, const float* g, float* const* moments, int64_t, int64_t n) {
        const auto& s = shared[static_cast<size_t>(i)];
        update(p, g, moments, n, step.inv_scale, s.clip, s.scalars);
      },
      [&](int64_t i, const float* weights, int64_t at, int64_t n) {
        keep_weights(work[static_cast<size_t>(i)], shared[static_cast<size_t>(i)], weights, at, n);
      });
}

}  // namespace ak
