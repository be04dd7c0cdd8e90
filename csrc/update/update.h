// One step of an optimizer over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32
// or split masters, 16-bit shadows, stochastic rounding and an average of the weights in the same pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

enum class Master : uint8_t { kNone, kFloat32, kSplit };

inline constexpr int kMaxMoments = 3;

/// One parameter. Every pointer is to its first element, aligned to the element; elements lie in the same order
/// everywhere.
struct ParamState {
  void* param;
  const void* grad;
  int64_t numel;
  DType param_dtype, grad_dtype;     ///< fp32, fp16 or bf16
  void* moments[kMaxMoments];        ///< what they are is the optimizer's business; null: there is none
  DType moment_dtypes[kMaxMoments];  ///< fp32 or bf16
  float* step;                       ///< one value, used by no other parameter
  Master master_kind;                ///< kNone: the param is its own master; the others need a 16-bit param
  void* master;                      ///< fp32 or int16 by `master_kind`; null for kNone
  void* shadow;                      ///< 16-bit copy of an fp32 param, or null
  DType shadow_dtype;
  float* ema;       ///< running average of the fp32 weight, or null
  bool stochastic;  ///< a 16-bit param that is its own master is rounded stochastically
  uint32_t index;   ///< the parameter's number, one of the keys of its random bits
  int group;
};

/// What the parameters of a group share; `Options` are the rule's (update/rule.h).
template <class Options>
struct ParamGroup {
  Options options;
  // On the device, in place of those of the options; null if the host's value counts.
  const float* lr;
  const double* weight_decay;
  bool maximize;
  double ema_decay;  ///< of the parameters that have an EMA
};

/// What other kernels decided, on the device; each may be null.
struct StepDecisions {
  const float* grad_scale;  ///< gradients are this factor too large
  const float* found_inf;   ///< > 0: nothing at all changes
  const float* sum_sq;      ///< squared norm of the unscaled gradients: they are clipped to `max_norm`
  float max_norm;
};

/// Half a step of a rule that needs norms of whole tensors, where the parameters are pieces of tensors. The first half
/// moves the moments and writes what it sums up, the second moves the weights by what is there. Both count the step.
struct StepHalf {
  double* squares = nullptr;  ///< two numbers a parameter; null: a whole step
  bool second = true;
};

/// Bytes of device memory one call needs; they may hold anything. `Rule`: update/rule.h.
template <class Rule>
size_t update_scratch_bytes(std::span<const ParamState> params);

/// One step of every parameter. A parameter has all the moments of the rule or the required ones alone; the others are
/// null. `seed` is the key of stochastic rounding. `scratch` is aligned to 16 bytes. Each rule's is in
/// update/rules/X.cu.
template <class Rule>
Status update(std::span<const ParamState> params, std::span<const ParamGroup<typename Rule::Options>> groups,
              const StepDecisions& decisions, uint64_t seed, void* scratch, const StepHalf& half, Stream stream);

}  // namespace ak
