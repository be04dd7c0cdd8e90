// Read-only check of gradients for inf and NaN, and their L2 or maximum norm, over a list of tensors of any dtypes in
// one launch; of the whole list or of each tensor.
#pragma once
#include <cstddef>
#include <span>

#include "device/status.h"
#include "gradients/grad_norm.h"
#include "gradients/list.h"

namespace ak {

// Bytes of device memory one call needs for `grads` on the current device. They may hold anything.
size_t check_and_norm_scratch_bytes(std::span<const GradRef> grads);
size_t check_and_norm_per_tensor_scratch_bytes(std::span<const GradRef> grads);

// *result = the norm of all elements g * inv, inv = 1 / *grad_scale (1 if `grad_scale` is null); *found_inf = 1 if some
// g * inv is inf or NaN, else 0. `scratch` is aligned to 16 bytes; `blocks_done` is 0 before the call and after it. The
// result depends on values, sizes, dtypes, alignments and the number of SMs alone: the same call gives the same bits.
Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                      uint32_t* blocks_done, float* result, float* found_inf, Stream stream);

// The same for each tensor: results[i] and found_infs[i] belong to grads[i]. Those of empty tensors are not written.
Status check_and_norm_per_tensor(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                                 float* results, float* found_infs, Stream stream);

}  // namespace ak
