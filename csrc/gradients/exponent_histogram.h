// How often each binary exponent occurs in each tensor of a list of any dtypes, in one launch; and the largest finite
// magnitude.
#pragma once
#include <cstdint>
#include <span>

#include "device/status.h"
#include "gradients/list.h"

namespace ak {

/// counts[i * kExponentBins + b] += the number of elements of tensor i in bin b (gradients/exponent.h; fp64 is rounded
/// to fp32 first), largest[i] = the larger of it and the bits of the tensor's largest finite magnitude. Both hold zeros
/// when the kernel starts.
Status exponent_histogram(std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest, Stream stream);

}  // namespace ak
