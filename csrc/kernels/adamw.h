// AdamW (and Adam) over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32 or
// split masters, 16-bit shadows, stochastic rounding and an average of the weights in the same pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "kernels/update.h"
#include "math/adamw.h"

namespace ak {

using AdamWGroup = ParamGroup<AdamWOptions>;

/// Bytes of device memory one call needs; they may hold anything.
size_t adamw_scratch_bytes(std::span<const ParamState> params);

/// One step of every parameter; its moments are exp_avg, exp_avg_sq and, with AMSGrad, max_exp_avg_sq, else null.
/// `seed` is the key of stochastic rounding. `scratch` is aligned to 16 bytes.
Status adamw(std::span<const ParamState> params, std::span<const AdamWGroup> groups, const StepDecisions& decisions,
             uint64_t seed, void* scratch, Stream stream);

}  // namespace ak
