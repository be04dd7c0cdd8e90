// A thread's elements in the optimizer kernels and casts: their places, and their loads, conversions and stores, of a
// dtype known at run time.
#pragma once
#include <type_traits>

#include "base/half.h"
#include "base/rounding.h"
#include "device/memory.cuh"
#include "device/warp.cuh"

namespace ak {

/// Place of a thread's eight elements: four from `first` on, and the four that stand kApart behind those. The next lane
/// has the next four, so that an access of a warp covers whole sectors of 32 bytes. Eight adjacent fp32 elements would
/// be two accesses, each of which touches every sector for half of its bytes.
struct Fours {
  static constexpr int kApart = 4 * kWarpThreads, kWarp = 2 * kApart;
  int64_t first;

  AK_DEVICE operator int64_t() const { return first; }
  /// The place of this thread in the block's first elements, kWarp a warp.
  static AK_DEVICE int of_thread() { return warp_index() * kWarp + lane_index() * 4; }
};

/// N values of a thread, each an element or a word of some, of which the first is at `from`. `At`, the type of the
/// elements' place: Fours, or int64_t for adjacent ones.
template <int N, class At, class T>
AK_DEVICE Vec<T, N> load_at(const T* from) {
  if constexpr (!std::is_same_v<At, Fours>) {
    return load_vec<N, Cache::kStreaming>(from);
  } else {
    const auto a = load_vec<N / 2, Cache::kStreaming>(from);
    const auto b = load_vec<N / 2, Cache::kStreaming>(from + N * Fours::kApart / 8);
    Vec<T, N> values;
    AK_UNROLL
    for (int j = 0; j < N; j++) values[j] = j < N / 2 ? a[j] : b[j - N / 2];
    return values;
  }
}

template <class At, class T, int N>
AK_DEVICE void store_at(T* to, const Vec<T, N>& values) {
  if constexpr (!std::is_same_v<At, Fours>) {
    store_vec<Cache::kStreaming>(to, values);
  } else {
    Vec<T, N / 2> half[2];
    AK_UNROLL
    for (int j = 0; j < N; j++) half[j / (N / 2)][j % (N / 2)] = values[j];
    store_vec<Cache::kStreaming>(to, half[0]);
    store_vec<Cache::kStreaming>(to + N * Fours::kApart / 8, half[1]);
  }
}

/// The bits of `V` fp32, fp16 or bf16 elements: V words, or V/2 (one for V = 1) with the rest unused.
template <int V>
struct RawElements;

template <>
struct RawElements<8> {
  Vec<uint32_t, 4> low, high;
};

template <>
struct RawElements<1> {
  uint32_t word;
};

template <class At>
AK_DEVICE RawElements<8> fetch8(const void* tensor, DType dtype, At i) {
  RawElements<8> raw{};  // defined on every path: an undefined `high` would keep its registers alive around the loop
  if (dtype == DType::kFloat32) {
    const auto words = load_at<8, At>(static_cast<const uint32_t*>(tensor) + i);
    AK_UNROLL
    for (int j = 0; j < 4; j++) {
      raw.low[j] = words[j];
      raw.high[j] = words[4 + j];
    }
  } else {
    raw.low = load_at<4, At>(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(tensor) + i));
  }
  return raw;
}

AK_DEVICE RawElements<1> fetch1(const void* tensor, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return {load<Cache::kStreaming>(static_cast<const uint32_t*>(tensor) + i)};
  return {load<Cache::kStreaming>(static_cast<const uint16_t*>(tensor) + i)};
}

/// The V elements at i; for V = 8 the tensor is aligned to 16 bytes, and i is a Fours or a multiple of 8.
template <int V, class At>
AK_DEVICE RawElements<V> fetch(const void* tensor, DType dtype, At i) {
  if constexpr (V == 8) {
    return fetch8(tensor, dtype, i);
  } else {
    return fetch1(tensor, dtype, i);
  }
}

namespace detail {

template <class T>
AK_DEVICE void decode16(const RawElements<8>& raw, float (&x)[8]) {
  AK_UNROLL
  for (int j = 0; j < 4; j++) {
    x[2 * j] = to_float(T{static_cast<uint16_t>(raw.low[j])});
    x[2 * j + 1] = to_float(T{static_cast<uint16_t>(raw.low[j] >> 16)});
  }
}
template <class T>
AK_DEVICE void decode16(const RawElements<1>& raw, float (&x)[1]) {
  x[0] = to_float(T{static_cast<uint16_t>(raw.word)});
}
AK_DEVICE void decode32(const RawElements<8>& raw, float (&x)[8]) {
  AK_UNROLL
  for (int j = 0; j < 4; j++) {
    x[j] = float_of(raw.low[j]);
    x[j + 4] = float_of(raw.high[j]);
  }
}
AK_DEVICE void decode32(const RawElements<1>& raw, float (&x)[1]) { x[0] = float_of(raw.word); }

}  // namespace detail

template <int V>
AK_DEVICE void decode(const RawElements<V>& raw, DType dtype, float (&x)[V]) {
  if (dtype == DType::kFloat32) {
    detail::decode32(raw, x);
  } else if (dtype == DType::kBFloat16) {
    detail::decode16<bf16>(raw, x);
  } else {
    detail::decode16<fp16>(raw, x);
  }
}

/// Stores x rounded to nearest-even as the elements at i of a T tensor.
template <class T, class At, int V>
AK_DEVICE void store_rounded(void* tensor, At i, const float (&x)[V]) {
  Vec<T, V> v;
  AK_UNROLL
  for (int j = 0; j < V; j++) v[j] = round_to<T>(x[j]);
  store_at<At>(static_cast<T*>(tensor) + i, v);
}

/// The same for an fp32 or bf16 tensor.
template <class At, int V>
AK_DEVICE void store_moment(void* tensor, DType dtype, At i, const float (&x)[V]) {
  if (dtype == DType::kFloat32) {
    store_rounded<float>(tensor, i, x);
  } else {
    store_rounded<bf16>(tensor, i, x);
  }
}

/// x as a fetch returns it after store_moment.
template <int V>
AK_DEVICE void as_stored(DType dtype, float (&x)[V]) {
  if (dtype == DType::kFloat32) return;
  AK_UNROLL
  for (int j = 0; j < V; j++) x[j] = to_float(round_to<bf16>(x[j]));
}

}  // namespace ak
