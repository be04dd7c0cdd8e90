#pragma once
// Access to an element of fp16, bf16 or fp32, selected at run time. The dtype is uniform, and so are the branches.
#include <cstdint>

#include "base/half.h"
#include "device/memory.cuh"
#include "device/tensor_list.cuh"

namespace ak {

/// Address of an element.
AK_DEVICE const uint8_t* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const uint8_t*>(data) + index * bytes_of(dtype);
}
AK_DEVICE uint8_t* element(void* data, DType dtype, int64_t index) {
  return static_cast<uint8_t*>(data) + index * bytes_of(dtype);
}

/// Conversions of a 16-bit value.
AK_DEVICE float widen_half(DType dtype, uint16_t bits) {
  return dtype == DType::kBFloat16 ? to_float(bf16{bits}) : to_float(fp16{bits});
}
AK_DEVICE uint16_t round_half(DType dtype, float x) {
  return dtype == DType::kBFloat16 ? round_to<bf16>(x).bits : round_to<fp16>(x).bits;
}

AK_DEVICE float load_element(DType dtype, const void* p) {
  if (dtype == DType::kFloat32) return load(static_cast<const float*>(p));
  return widen_half(dtype, load(static_cast<const uint16_t*>(p)));
}
AK_DEVICE void store_element(DType dtype, void* p, float x) {
  if (dtype == DType::kFloat32) return store(static_cast<float*>(p), x);
  store(static_cast<uint16_t*>(p), round_half(dtype, x));
}

}  // namespace ak
