// AdamW (and Adam) over a list of parameters of any dtypes and groups, with unscaling, clipping, skipping, fp32 or
// split masters and 16-bit shadows in the same pass.
#pragma once
#include <cstddef>
#include <span>

#include "device/status.h"
#include "kernels/update.h"
#include "math/adamw.h"

namespace ak {

using AdamWGroup = ParamGroup<AdamWOptions>;

/// Bytes of device memory one call needs; they may hold anything.
size_t adamw_scratch_bytes(size_t params);

/// One step of every parameter; its moments are exp_avg and exp_avg_sq. `scratch` is aligned to 16 bytes.
Status adamw(std::span<const ParamState> params, std::span<const AdamWGroup> groups, const StepDecisions& decisions,
             void* scratch, Stream stream);

}  // namespace ak
