// LAMB over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32 or split masters,
// 16-bit shadows, stochastic rounding and an average of the weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "kernels/update.h"
#include "math/lamb.h"

namespace ak {

using LambGroup = ParamGroup<LambOptions>;

/// Bytes of device memory one call needs; they may hold anything.
size_t lamb_scratch_bytes(std::span<const ParamState> params);

/// One step of every parameter; its moments are exp_avg and exp_avg_sq, and each has a trust ratio of its own. `seed`
/// is the key of stochastic rounding. `scratch` is aligned to 16 bytes.
Status lamb(std::span<const ParamState> params, std::span<const LambGroup> groups, const StepDecisions& decisions,
            uint64_t seed, void* scratch, Stream stream);

}  // namespace ak
