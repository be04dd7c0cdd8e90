// Facts that the name of a GPU tells and its compute capability does not. No CUDA header: planners include it, too.
#pragma once
#include <string_view>

namespace ak {

/// True for an NVIDIA GeForce: half of a workstation chip's multiply-adds with fp32 sums.
inline bool is_geforce(std::string_view name) { return name.starts_with("NVIDIA GeForce"); }

}  // namespace ak
