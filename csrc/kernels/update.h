// What every optimizer kernel takes: parameters with their state, their groups, and the decisions of the step.
#pragma once
#include <cstdint>

#include "device/tensor_list.cuh"

namespace ak {

enum class Master : uint8_t { kNone, kFloat32, kSplit };

/// One parameter. Every pointer is to its first element, aligned to the element; elements lie in the same order
/// everywhere.
struct ParamState {
  void* param;
  const void* grad;
  int64_t numel;
  DType param_dtype, grad_dtype;  ///< fp32, fp16 or bf16
  void* moments[2];               ///< what they are is the optimizer's business
  DType moment_dtypes[2];         ///< fp32 or bf16
  float* step;                    ///< one value, used by no other parameter
  Master master_kind;             ///< kNone: the param is its own master; the others need a 16-bit param
  void* master;                   ///< fp32 or int16 by `master_kind`; null for kNone
  void* shadow;                   ///< 16-bit copy of an fp32 param, or null
  DType shadow_dtype;
  int group;
};

/// What the parameters of a group share; `Options` are the optimizer's (math/adamw.h, ...).
template <class Options>
struct ParamGroup {
  Options options;
  const float* lr;  ///< on the device, in place of options.lr; null if the host's value counts
  bool maximize;
};

/// What other kernels decided, on the device; each may be null.
struct StepDecisions {
  const float* grad_scale;  ///< gradients are this factor too large
  const float* found_inf;   ///< > 0: nothing at all changes
  const float* sum_sq;      ///< squared norm of the unscaled gradients: they are clipped to `max_norm`
  float max_norm;
};

}  // namespace ak
