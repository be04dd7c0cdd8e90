// The calls of the ops over lists of gradients of any dtypes, and of the loss scale's update. Each list takes one
// launch on a GPU, or few.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "device/status.h"
#include "gradients/grad_norm.h"
#include "gradients/loss_scale.h"
#include "gradients/unit.h"

namespace ak {

template <class Void>  // void or const void
struct GradRefTo {
  Void* data;  // aligned to its element; elements in memory order
  int64_t numel;
  DType dtype;
};
using GradRef = GradRefTo<const void>;
using MutableGradRef = GradRefTo<void>;

// ---- check_and_norm: a read-only check for inf and NaN, and the L2 or maximum norm

/// Bytes of scratch for one call on the current device, uninitialised; the CPU needs none.
size_t check_and_norm_scratch_bytes(std::span<const GradRef> grads);
size_t check_and_norm_per_tensor_scratch_bytes(std::span<const GradRef> grads);

/// *result = the norm of all elements g * inv, inv = 1 / *grad_scale (1 if `grad_scale` is null); *found_inf = 1 if
/// some g * inv is inf or NaN, else 0. `scratch` is aligned to 16 bytes; *blocks_done is 0 before the call and after
/// it. The bits of the result depend on values, sizes, dtypes, alignments and the number of SMs alone.
Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                      uint32_t* blocks_done, float* result, float* found_inf, Stream stream);

/// The same for each tensor: results[i] and found_infs[i] belong to grads[i]. A GPU does not write those of empty
/// tensors.
Status check_and_norm_per_tensor(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                                 float* results, float* found_infs, Stream stream);

// ---- unscale_

/// g *= *inv_scale for every element, rounded to its dtype (the product is formed in fp32, for fp64 in fp64);
/// *found_inf = 1 if a result is inf or NaN, else it is unchanged. Without found_inf a factor of 1 reads and writes
/// nothing.
Status unscale(std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale, Stream stream);

// ---- exponent_histogram

/// counts[i * kExponentBins + b] += the number of elements of tensor i in bin b (gradients/exponent.h; fp64 is rounded
/// to fp32 first), largest[i] = the maximum of it and the bits of the tensor's largest finite magnitude. Both are zero
/// before the call.
Status exponent_histogram(std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest, Stream stream);

// ---- update_scale_

/// The addresses of the loss scale and its trackers (gradients/loss_scale.h).
struct LossScaleRef {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;
  int64_t *skipped_steps, *consecutive_skips;  // may be null
};

/// Bytes of scratch for one call, uninitialised: none unless the list is long.
size_t update_scale_scratch_bytes(size_t found_infs);

/// One step of the rule; an overflow is a positive value among `found_infs`. `scratch` is aligned to 4 bytes.
Status update_scale(const LossScaleRef& scale, std::span<const float* const> found_infs,
                    const LossScaleOptions& options, void* scratch, Stream stream);

// ---- judge_units_

/// The tensors of a step and the units that they belong to.
struct UnitsRef {
  int64_t units, tensors;
  const float *sums, *flags;  // by tensor: squares; above 0: not finite, below: no gradient
  const int64_t* rows;        // unit after unit the numbers of the tensors, ~number where the square counts elsewhere
  const int64_t* ends;        // by unit, in rows
  const UnitRule* rules;
  UnitStatistics* statistics;
  const float* found_infs;  // by unit, of an earlier check; may be null
  float* factors;           // by tensor
  float* results;           // norms, skips, flags: three rows, by unit
};

/// Decides about every unit that was asked for and has a gradient; the others get kLeave, and norm 0.
Status judge_units(const UnitsRef& at, Stream stream);

}  // namespace ak
