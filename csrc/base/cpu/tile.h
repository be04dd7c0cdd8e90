// A tile: a contiguous span of a 16-bit or fp32 tensor as floats, small enough for the L1 cache. Kernels load operands
// into tiles, run one loop over floats, and store, so the number of compiled loops grows with the sum of the dtypes,
// not with their product. The extra traffic stays in L1.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>

#include "base/cpu/half_spans.h"
#include "base/cpu/simd.h"
#include "base/dtype.h"
#include "base/half.h"
#include "base/split_master.h"

namespace ak {

inline constexpr int64_t kTile = 1024;

// Prefetches a line for the first pass over a row; it may be out of bounds. Issued one at a time within the loop, since
// many at once stall each other and later loads.
template <bool kWrites = false, typename T>
AK_SIMD_INLINE void prefetch_ahead(const T* at) {
  constexpr int kBytes = 2048;
  __builtin_prefetch(reinterpret_cast<const char*>(at) + kBytes, kWrites);
}

// Cache-line aligned memory: a vector that crosses lines takes two accesses.
inline constexpr std::align_val_t kLineAlignment{64};
struct DeleteAligned {
  void operator()(float* at) const { ::operator delete[](at, kLineAlignment); }
};
using Buffer = std::unique_ptr<float[], DeleteAligned>;
inline Buffer make_buffer(int64_t n) {
  return Buffer(static_cast<float*>(::operator new[](static_cast<size_t>(n) * sizeof(float), kLineAlignment)));
}

// Memory for n floats, with inline storage up to one tile.
class RowBuffer {
 public:
  explicit RowBuffer(int64_t n) : more_(n > kTile ? make_buffer(n) : nullptr) {}
  float* get() { return more_ ? more_.get() : own_; }

 private:
  alignas(64) float own_[kTile];
  Buffer more_;
};

// f of a value of the type of a dtype other than fp64.
template <typename F>
auto with_narrow_dtype(DType dtype, const F& f) {
  if (dtype == DType::kFloat16) return f(fp16{});
  if (dtype == DType::kBFloat16) return f(bf16{});
  return f(float{});
}

// The same for any dtype.
template <typename F>
auto with_dtype(DType dtype, const F& f) {
  return dtype == DType::kFloat64 ? f(double{}) : with_narrow_dtype(dtype, f);
}

template <typename T>
AK_SIMD_INLINE void widen_span(const T* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
// Prefetches from L2, 64 bytes (two vectors of results) at a time.
AK_SIMD_INLINE void widen_span(const bf16* from, float* to, int64_t n) {
  constexpr int kLine = 32;
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    prefetch_ahead(from + i);
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int64_t k = i; k < i + kLine; ++k) to[k] = to_float(from[k]);
  }
#pragma GCC ivdep
  for (; i < n; ++i) to[i] = to_float(from[i]);
}
AK_SIMD_INLINE void widen_span(const fp16* from, float* to, int64_t n) { widen_half(from, to, n); }

template <typename T>
AK_SIMD_INLINE void round_span(const float* __restrict from, T* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = round_to<T>(from[i]);
}
AK_SIMD_INLINE void round_span(const float* from, fp16* to, int64_t n) { round_half(from, to, n); }
AK_SIMD_INLINE void round_span(const float* from, bf16* to, int64_t n) { round_bf16(from, to, n); }

// Calls make(out), which writes n floats. 16-bit results are made in `tile` and then rounded.
template <typename T, typename Make>
void make_rounded(T* out, float* tile, int64_t n, const Make& make) {
  if constexpr (std::is_same_v<T, float>) {
    make(out);
  } else {
    make(tile);
    round_span(tile, out, n);
  }
}

// Split masters, with a remainder of 16 or 8 bits.
template <typename T, typename Remainder>
AK_SIMD_CLONES void join_span(const T* __restrict weight, const Remainder* __restrict remainder,
                              float* __restrict master, int64_t n) {
  for (int64_t i = 0; i < n; ++i) master[i] = join_master(weight[i], remainder[i]);
}

template <typename T>
AK_SIMD_CLONES void split_span(const float* __restrict master, T* __restrict weight, int16_t* __restrict remainder,
                               int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const SplitMaster<T> s = split_master<T>(master[i]);
    weight[i].bits = s.weight.bits;  // by member: gcc does not vectorize nested struct copies
    remainder[i] = s.remainder;
  }
}

// `random`: 8 bits an element; bits above them do not count.
template <typename T>
AK_SIMD_CLONES void split24_span(const float* __restrict master, const uint32_t* __restrict random,
                                 T* __restrict weight, int8_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const SplitMaster<T> s = split_master24<T>(master[i], random[i] & 0xffu);
    weight[i].bits = s.weight.bits;
    remainder[i] = static_cast<int8_t>(s.remainder >> 8);
  }
}

template <typename T>
AK_SIMD_CLONES bool any_non_finite(const T* x, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= is_finite(x[i]) ? 0u : 1u;
  return found != 0;
}

// Elements [at, at + n) of an fp16, bf16 or fp32 tensor: in place if fp32, else converted into `buffer`. load_span and
// store_span are for functions that have clones themselves.
AK_SIMD_INLINE const float* load_span(const void* data, DType dtype, int64_t at, int64_t n, float* buffer) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data) + at;
  if (dtype == DType::kFloat16) {
    widen_span(static_cast<const fp16*>(data) + at, buffer, n);
  } else {
    widen_span(static_cast<const bf16*>(data) + at, buffer, n);
  }
  return buffer;
}

// Rounds to the tensor's dtype. fp32 elements have been changed in place.
AK_SIMD_INLINE void store_span(const float* values, void* data, DType dtype, int64_t at, int64_t n) {
  if (dtype == DType::kFloat16) {
    round_span(values, static_cast<fp16*>(data) + at, n);
  } else if (dtype == DType::kBFloat16) {
    round_span(values, static_cast<bf16*>(data) + at, n);
  }
}

AK_SIMD_CLONES inline const float* load_tile(const void* data, DType dtype, int64_t at, int64_t n, float* buffer) {
  return load_span(data, dtype, at, n, buffer);
}

// load_tile for elements that will be changed.
inline float* load_tile(void* data, DType dtype, int64_t at, int64_t n, float* buffer) {
  return const_cast<float*>(load_tile(static_cast<const void*>(data), dtype, at, n, buffer));
}

// n values as floats, converted into `buffer` if necessary; all `absent` if `data` is null.
inline const float* values_or(const void* data, DType dtype, float absent, int64_t n, float* buffer) {
  if (data) return load_tile(data, dtype, 0, n, buffer);
  std::fill_n(buffer, n, absent);
  return buffer;
}

AK_SIMD_CLONES inline void store_tile(const float* tile, void* data, DType dtype, int64_t at, int64_t n) {
  store_span(tile, data, dtype, at, n);
}

}  // namespace ak
