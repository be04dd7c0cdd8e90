#pragma once
// A row of a matrix in the registers of a block: thread t holds the vectors t, t + kThreads, ... of a piece of the row.
// A row that is longer than the block can hold is walked piece by piece.
#include <cstdint>

#include "device/block.cuh"
#include "device/memory.cuh"
#include "device/tensor_list.cuh"
#include "math/half.h"

namespace ak {

inline constexpr int kHeld = 16;    ///< columns that a thread holds
inline constexpr int kWideRow = 8;  ///< columns of a vector where all rows are aligned; else 1

using RowValues = float[kHeld];

/// Calls f with a value of the type that `dtype` names: fp16, bf16 or fp32.
template <class F>
AK_DEVICE void with_row_dtype(DType dtype, F f) {
  if (dtype == DType::kFloat16) {
    f(fp16{});
  } else if (dtype == DType::kBFloat16) {
    f(bf16{});
  } else {
    f(float{});
  }
}

/// Calls f(first held value, column) for the vectors of this thread of which a piece with `left` columns has any.
template <int kThreads, int kVec, class F>
AK_DEVICE void for_each_held(int left, F f) {
  AK_UNROLL
  for (int k = 0; k < kHeld / kVec; k++) {
    const int column = (k * kThreads + thread_index()) * kVec;
    if (column < left) f(k * kVec, column);
  }
}

/// values = the elements of `data` from `at` on, 0 beyond the `left` columns of the piece. All loads are on their way
/// before the first is waited for.
template <int kThreads, int kVec>
AK_DEVICE void load_row(RowValues& values, const void* data, DType dtype, int64_t at, int left) {
  AK_UNROLL
  for (int j = 0; j < kHeld; j++) values[j] = 0.0f;
  with_row_dtype(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(data) + at;
    for_each_held<kThreads, kVec>(left, [&](int held, int column) {
      const auto v = load_vec<kVec>(from + column);
      AK_UNROLL
      for (int j = 0; j < kVec; j++) values[held + j] = to_float(v[j]);
    });
  });
}

/// Rounds the values and stores them; they become what was stored.
template <int kThreads, int kVec>
AK_DEVICE void store_row(RowValues& values, void* data, DType dtype, int64_t at, int left) {
  with_row_dtype(dtype, [&]<class T>(T) {
    T* to = static_cast<T*>(data) + at;
    for_each_held<kThreads, kVec>(left, [&](int held, int column) {
      Vec<T, kVec> v;
      AK_UNROLL
      for (int j = 0; j < kVec; j++) {
        v[j] = round_to<T>(values[held + j]);
        values[held + j] = to_float(v[j]);
      }
      store_vec(to + column, v);
    });
  });
}

/// Whether rows of `columns` elements from `data` on can be read in vectors.
inline bool rows_aligned(const void* data, int columns) {
  return columns % kWideRow == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

/// Calls f with the template arguments <threads of a block, columns of a vector, whether a block holds a row>.
template <class F>
Status with_row_shape(int columns, bool aligned, const F& f) {
  const auto with_vector = [&]<int kVec>() {
    if (columns <= 32 * kHeld) return f.template operator()<32, kVec, true>();
    if (columns <= 128 * kHeld) return f.template operator()<128, kVec, true>();
    if (columns <= 512 * kHeld) return f.template operator()<512, kVec, true>();
    return f.template operator()<512, kVec, false>();
  };
  return aligned ? with_vector.template operator()<kWideRow>() : with_vector.template operator()<1>();
}

}  // namespace ak
