// torch's dtypes, by name and as the kernels' DType.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <stdexcept>
#include <string>

#include "base/dtype.h"

namespace ak {

using torch::headeronly::ScalarType;

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline DType dtype_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      throw std::runtime_error(std::string("no kernel works on dtype ") + dtype_name(dtype));
  }
}

inline bool is_half(ScalarType dtype) { return dtype == ScalarType::Half || dtype == ScalarType::BFloat16; }

}  // namespace ak
