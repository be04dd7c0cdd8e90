// What all updates share on the CPU: the decisions of a step, how a weight is kept, and the walk over the parameters.
// Their arguments: ops/update_arguments.h.
//
// Everything is checked and every decision made before the first write; then the parameters are walked once, in tiles:
// gradients are read once, weights and moments read and written once.
#pragma once

#include <vector>

#include "math/clip.h"
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

// Writes the changed weights to wherever they are kept, rounded: parameter, remainder, shadow.
void store_weights(const UpdateParam& p, const float* weights, int64_t at, int64_t n);

// Cuts the parameters into chunks and tiles and calls update(index of the parameter, its weights, its gradients, the
// two moments (null where there are none), n) for each tile, on several threads.
template <typename Update>
void for_each_tile(const std::vector<UpdateParam>& params, const Update& update) {
  const std::vector<Chunk> chunks =
      make_chunks(static_cast<int64_t>(params.size()), [&](int64_t i) { return params[static_cast<size_t>(i)].numel; });
  for_each_chunk(chunks, [&](int64_t, const Chunk& chunk) {
    alignas(64) float buffers[4][kTile];
    const UpdateParam& p = params[static_cast<size_t>(chunk.tensor)];
    for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
      const int64_t n = std::min(kTile, chunk.end - at);
      float* weights = load_weights(p, at, n, buffers[0]);
      const float* grads = load_tile(p.grad.as_const(), p.grad.dtype, at, n, buffers[1]);
      float* moments[2] = {nullptr, nullptr};
      for (int k = 0; k < 2; ++k) {
        if (p.moments[k].data) moments[k] = load_tile(p.moments[k].data, p.moments[k].dtype, at, n, buffers[2 + k]);
      }
      update(chunk.tensor, weights, grads, moments[0], moments[1], n);
      for (int k = 0; k < 2; ++k) {
        if (p.moments[k].data) store_tile(moments[k], p.moments[k].data, p.moments[k].dtype, at, n);
      }
      store_weights(p, weights, at, n);
    }
  });
}

// One step, or none if it is to be skipped. `scalars_of(group, learning rate, step count)` derives what the elements of
// a parameter share; `update(weights, gradients, the two moments, n, inv_scale, clip, scalars)` is the formula for a
// tile, with a negative clip factor when maximizing.
template <typename ScalarsOf, typename Update>
void take_step(const UpdateTensors& tensors, const std::vector<double>& lr, const std::vector<int64_t>& flags,
               double max_norm, const ScalarsOf& scalars_of, const Update& update) {
  const std::vector<UpdateParam> work = check_update(tensors, static_cast<int64_t>(lr.size()));
  const UpdateDecision step = decide(tensors, max_norm);
  if (step.skip) return;

  std::vector<decltype(scalars_of(size_t{}, 0.0, 0.0f))> scalars;
  scalars.reserve(work.size());
  for (const UpdateParam& p : work) {
    *p.step += 1.0f;
    scalars.push_back(scalars_of(static_cast<size_t>(p.group), learning_rate(tensors.lrs, lr, p.group), *p.step));
  }
  for_each_tile(work, [&](int64_t i, float* p, const float* g, float* m0, float* m1, int64_t n) {
    const size_t k = static_cast<size_t>(i);
    const float clip = flags[static_cast<size_t>(work[k].group)] & kMaximize ? -step.clip : step.clip;
    update(p, g, m0, m1, n, step.inv_scale, clip, scalars[k]);
  });
}

}  // namespace ak
