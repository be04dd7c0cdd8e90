// The call of cast_: a list of tensors rounded or widened into another list, in one launch on a GPU.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// Two tensors of `numel` elements in the same memory order, each fp32, fp16 or bf16 and aligned to its element.
struct CastRef {
  void* destination;
  const void* source;
  int64_t numel;
  DType to, from;
};

/// destination = source for every element, rounded to nearest even or, given a seed, stochastically (base/philox.h).
/// *step counts the steps for the random bits; null is 0.
Status cast(std::span<const CastRef> casts, std::optional<uint64_t> seed, const float* step, Stream stream);

}  // namespace ak
