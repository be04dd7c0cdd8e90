// What adamw_ and sgd_ share on the CPU: the decisions of a step, and how a weight is kept. Their arguments:
// ops/update_arguments.h.
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

}  // namespace ak
