// Memory for results.
#pragma once

#include <vector>

#include "base/check.h"

namespace ak {

// An uninitialised contiguous CPU tensor, at half of what torch::stable::empty and new_empty cost: they go through the
// dispatcher, and this is a third of what a small op takes.
Tensor empty_tensor(const std::vector<int64_t>& sizes, ScalarType type);

}  // namespace ak
