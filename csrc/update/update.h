// One step of an optimizer over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32
// or split masters, moments in 8 bits, 16-bit shadows, stochastic rounding and an average of the weights in the same
// pass.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/philox.h"
#include "device/status.h"

namespace ak {

enum class Master : uint8_t { kNone, kFloat32, kSplit, kSplit24 };

inline constexpr int kMaxMoments = 3;

/// The last two dimensions of a tensor; the others are a batch of such matrices. A vector has one row.
struct MatrixShape {
  int64_t rows, columns;

  bool operator==(const MatrixShape&) const = default;
};

/// One parameter with its state. Every pointer is to its first element, aligned to the element; elements are in the
/// same order everywhere.
struct Param {
  int64_t numel;
  MatrixShape shape;  ///< for rules that take whole tensors (update/rule.h)
  void* param;
  const void* grad;
  DType param_dtype, grad_dtype;     ///< fp32, fp16 or bf16
  void* moments[kMaxMoments];        ///< the rule's; null: absent
  DType moment_dtypes[kMaxMoments];  ///< fp32 or bf16, unless the moments are in 8 bits
  uint8_t* exponents[kMaxMoments];   ///< of moments in 8 bits, all that are present or none (base/block8.h); or null
  float* step;                       ///< one value, used by no other parameter
  Master master_kind;                ///< kNone: the param is its own master; the others need a 16-bit param
  void* master;                      ///< fp32, int16 or int8 by `master_kind`; null for kNone
  void* shadow;                      ///< 16-bit copy of an fp32 param, or null
  DType shadow_dtype;
  float* ema;          ///< running average of the fp32 weight, or null
  bool stochastic;     ///< a 16-bit param that is its own master is rounded stochastically
  RandomPlace random;  ///< of its random bits
  int group;

  bool in_8_bits() const { return exponents[0] != nullptr; }
};

/// Positions of the parameters that have elements, those of one shape together; shapes in the order in which they
/// appear.
inline std::vector<std::vector<size_t>> group_by_shape(std::span<const Param> params) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < params.size(); i++) {
    if (params[i].numel == 0) continue;
    const auto same = [&](const auto& group) { return params[group[0]].shape == params[i].shape; };
    const auto found = std::find_if(groups.begin(), groups.end(), same);
    (found == groups.end() ? groups.emplace_back() : *found).push_back(i);
  }
  return groups;
}

/// Shared by the parameters of a group; `Options` are the rule's (update/rule.h).
template <class Options>
struct ParamGroup {
  Options options;
  // On the device, in place of those of the options; null: the option counts.
  const float* lr;
  const double* weight_decay;
  bool maximize;
  double ema_decay;  ///< of the parameters that have an EMA
};

/// Scalars on the device that other kernels wrote; each may be null.
struct StepDecisions {
  const float* grad_scale;  ///< gradients are this factor too large
  const float* found_inf;   ///< > 0: nothing at all changes
  const float* sum_sq;      ///< squared norm of the unscaled gradients: they are clipped to `max_norm`
  const float* factors;     ///< for each parameter its clip factor or kLeave (gradients/clip.h), in place of sum_sq
  float max_norm;
};

/// Half a step of a rule with a stage, for parameters that are pieces of tensors. The first half moves the moments and
/// writes the sums of each piece; the second moves the weights and reads the sums of the whole tensors. Both count the
/// step.
struct StepHalf {
  double* squares = nullptr;  ///< two sums a parameter; null: a whole step
  bool second = true;
};

/// Bytes of device memory that a call needs; they need not be initialized. `Rule`: update/rule.h.
template <class Rule>
size_t update_scratch_bytes(std::span<const Param> params);

/// One step of every parameter. A parameter has all moments of the rule or only the required ones; the others are null.
/// `seed` is the key of stochastic rounding. `scratch` is aligned to 16 bytes. Instantiated in update/rules/X.cu.
template <class Rule>
Status update(std::span<const Param> params, std::span<const ParamGroup<typename Rule::Options>> groups,
              const StepDecisions& decisions, uint64_t seed, void* scratch, const StepHalf& half, Stream stream);

}  // namespace ak
