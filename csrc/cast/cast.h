// A list of tensors rounded or widened into another list, each to its own dtype, in one launch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// Two tensors of `numel` elements in the same memory order, each fp32, fp16 or bf16 and aligned to its element.
struct CastRef {
  void* destination;
  const void* source;
  int64_t numel;
  DType to, from;
};

/// The pairs of one launch.
template <int N>
struct CastListArgs {
  static constexpr int kTensors = N;
  ChunkMap<N> map;
  void* destination[N];
  const void* source[N];
  uint32_t index[N];  ///< position in the list, part of the key of the random bits
  DType to[N], from[N];

  void set(int place, const CastRef& cast, size_t position) {
    destination[place] = cast.destination;
    source[place] = cast.source;
    index[place] = static_cast<uint32_t>(position);
    to[place] = cast.to;
    from[place] = cast.from;
  }
};
inline constexpr int kCastListTensors = 928;
static_assert(sizeof(CastListArgs<kCastListTensors>) + 128 <= kArgumentBytes,
              "the list and the other arguments must fit one launch");

/// destination = source for every element, rounded to nearest even or, given a seed, stochastically (base/philox.h);
/// `step`, null for 0, is where the random bits' step count stands.
Status cast(std::span<const CastRef> casts, std::optional<uint64_t> seed, const float* step, Stream stream);

}  // namespace ak
