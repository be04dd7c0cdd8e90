#pragma once
// device/tensor_map.cuh on the emulator: the map is its specification, after the driver's checks.
#include "emulator/error.h"

namespace ak {

struct alignas(64) TensorMap {
  TensorMapSpec spec;
};

inline Status make_tensor_map(TensorMap* map, const TensorMapSpec& spec) {
  const uint64_t element = bytes_of(spec.type);
  bool ok = spec.rank >= 2 && spec.rank <= 4 && reinterpret_cast<uintptr_t>(spec.base) % 16 == 0 &&
            spec.box[0] * element == row_bytes(spec.swizzle);
  for (int i = 0; i < spec.rank && ok; i++) {
    ok = spec.size[i] >= 1 && spec.size[i] <= uint64_t{1} << 32 && spec.box[i] >= 1 && spec.box[i] <= 256;
    if (i + 1 < spec.rank)
      ok = ok && spec.stride[i] * element % 16 == 0 && spec.stride[i] * element < uint64_t{1} << 40;
  }
  if (!ok) return {1, "cuTensorMapEncodeTiled refused the tensor"};
  map->spec = spec;
  return {};
}

}  // namespace ak
