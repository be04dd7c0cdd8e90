// The dtypes of elements that kernels read and write.
#pragma once
#include <cstdint>

#include "base/config.h"

namespace ak {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

AK_HD constexpr int bytes_of(DType t) { return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2; }

}  // namespace ak
