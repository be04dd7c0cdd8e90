// Gradients times the inverse loss scale, in place, and a flag if one of them becomes inf or NaN, over a list of
// tensors of any dtypes in one launch.
#pragma once
#include <span>

#include "device/status.h"
#include "gradients/list.h"

namespace ak {

/// g *= *inv_scale for every element, rounded to its dtype (the product is formed in fp32, of fp64 in fp64);
/// *found_inf = 1 if a result is inf or NaN, and is left alone otherwise. found_inf may be null: then nobody asks what
/// the results are, and for a factor of 1 nothing is read or written.
Status unscale(std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale, Stream stream);

}  // namespace ak
