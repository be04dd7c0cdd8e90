// SGD, with or without momentum, over a list of parameters of any dtypes and groups, with unscaling, clipping,
// skipping, fp32 or split masters, 16-bit shadows, stochastic rounding and an average of the weights in the same pass.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "device/status.h"
#include "kernels/update.h"
#include "math/sgd.h"

namespace ak {

using SgdGroup = ParamGroup<SgdOptions>;

/// Bytes of device memory one call needs; they may hold anything.
size_t sgd_scratch_bytes(std::span<const ParamState> params);

/// One step of every parameter; its first moment is the momentum buffer, null for a parameter without momentum, and
/// there is no second. `seed` is the key of stochastic rounding. `scratch` is aligned to 16 bytes.
Status sgd(std::span<const ParamState> params, std::span<const SgdGroup> groups, const StepDecisions& decisions,
           uint64_t seed, void* scratch, Stream stream);

}  // namespace ak
