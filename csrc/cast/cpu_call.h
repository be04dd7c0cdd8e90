// cast_ over plain pointers, rounded to nearest, for a caller that has checked what the op checks and calls from C++
// (csrc/autograd/cast.cpp).
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace ak {

using torch::headeronly::ScalarType;

// The elements of one dense tensor into another, in the order of memory.
struct Cast {
  void* to;
  const void* from;
  int64_t numel;
  ScalarType to_type, from_type;  // fp16, bf16 or fp32
};

__attribute__((visibility("default"))) void cast_call(const std::vector<Cast>& casts);

}  // namespace ak
