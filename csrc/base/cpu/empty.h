// Allocation of results.
#pragma once

#include <vector>

#include "base/check.h"

namespace ak {

// An uninitialized contiguous CPU tensor. Bypasses the dispatcher, at half the cost of torch::stable::empty, since
// allocation is a third of a small op's time.
Tensor empty_tensor(const std::vector<int64_t>& sizes, ScalarType type);

}  // namespace ak
