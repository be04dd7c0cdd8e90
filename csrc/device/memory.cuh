#pragma once
// Global memory accesses. Kernels use only these functions, whose emulated versions check bounds, alignment, reads of
// uninitialized memory and data races.
#include "device/platform.cuh"

namespace ak {

/// Cache policy of an access. Streaming ("evict first", .cs) is for bytes accessed once.
enum class Cache { kDefault, kStreaming };

/// N values that are accessed together: up to 16 bytes at once, or in several accesses of 16.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  static constexpr int kAccessBytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  static_assert(sizeof(T) * N == 1 || sizeof(T) * N == 2 || sizeof(T) * N == 4 || sizeof(T) * N == 8 ||
                    sizeof(T) * N % 16 == 0,
                "a vector access is 1, 2, 4 or 8 bytes or a multiple of 16");
  T data[N];

  AK_DEVICE T& operator[](int i) { return data[i]; }
  AK_DEVICE const T& operator[](int i) const { return data[i]; }
};

/// True if `data` is aligned to 16 bytes.
inline bool vector_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace ak

#ifdef AK_EMULATE
#include "emulator/memory_access.h"
#else

namespace ak {
namespace detail {

template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <Cache kCache, class W>
AK_DEVICE W load_word(const W* p) {
  if constexpr (kCache == Cache::kStreaming) {
    return __ldcs(p);
  } else {
    return *p;
  }
}
template <Cache kCache, class W>
AK_DEVICE void store_word(W* p, W value) {
  if constexpr (kCache == Cache::kStreaming) {
    __stcs(p, value);
  } else {
    *p = value;
  }
}

}  // namespace detail

/// Loads `N` values from `p`, which must be aligned to the size of the access, at most 16 bytes.
template <int N, Cache kCache = Cache::kDefault, class T>
AK_DEVICE Vec<T, N> load_vec(const T* p) {
  using Word = typename detail::Word<Vec<T, N>::kAccessBytes>::type;
  union {
    Word words[sizeof(Vec<T, N>) / sizeof(Word)];
    Vec<T, N> values;
  } u;
  AK_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(u.words) / sizeof(Word)); i++) {
    u.words[i] = detail::load_word<kCache>(reinterpret_cast<const Word*>(p) + i);
  }
  return u.values;
}

/// Stores all of `values` at `p`; alignment as for load_vec.
template <Cache kCache = Cache::kDefault, class T, int N>
AK_DEVICE void store_vec(T* p, const Vec<T, N>& values) {
  using Word = typename detail::Word<Vec<T, N>::kAccessBytes>::type;
  union {
    Vec<T, N> values;
    Word words[sizeof(Vec<T, N>) / sizeof(Word)];
  } u{values};
  AK_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(u.words) / sizeof(Word)); i++) {
    detail::store_word<kCache>(reinterpret_cast<Word*>(p) + i, u.words[i]);
  }
}

/// Loads one value.
template <Cache kCache = Cache::kDefault, class T>
AK_DEVICE T load(const T* p) {
  return load_vec<1, kCache>(p).data[0];
}
/// Stores one value.
template <Cache kCache = Cache::kDefault, class T>
AK_DEVICE void store(T* p, T value) {
  store_vec<kCache>(p, Vec<T, 1>{{value}});
}

}  // namespace ak
#endif
