// Read-only check of gradients for inf and NaN, and their L2 norm, over a list of tensors of any dtypes in one launch.
#pragma once
#include <cstddef>
#include <span>

#include "device/status.h"
#include "kernels/grad_list.h"

namespace ak {

// Bytes of device memory one call of check_and_norm needs for `grads` on the current device. The first
// kNormScratchZeroed bytes must be zero when the kernels start; the rest may hold anything.
size_t check_and_norm_scratch_bytes(std::span<const GradRef> grads);
inline constexpr size_t kNormScratchZeroed = 16;

// *sum_sq = sum over all elements of (g * inv)^2, inv = 1 / *grad_scale (1 if `grad_scale` is null); *found_inf = 1 if
// some g * inv is inf or NaN, else 0. `scratch` is aligned to 16 bytes. The result depends on sizes, dtypes, alignments
// and the number of SMs alone: the same call gives the same bits.
Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, void* scratch, float* sum_sq,
                      float* found_inf, Stream stream);

}  // namespace ak
