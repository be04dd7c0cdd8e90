#pragma once
// A row of a matrix in the registers of kThreads threads, a block or one of its warps: thread t holds the vectors t,
// t + kThreads, ... of a piece of the row. Longer rows are walked piece by piece.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/half.h"
#include "device/block.cuh"
#include "device/memory.cuh"
#include "device/status.h"

namespace ak {

inline constexpr int kWord = 16;  ///< bytes of an access

inline constexpr int kHeld = 16;    ///< columns that a thread of a block holds
inline constexpr int kWideRow = 8;  ///< rows of a multiple of so many columns are aligned if the first one is
inline constexpr int kRowVec = 4;   ///< columns of a vector where all rows are aligned, 16 bytes of fp32; else 1

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

/// A vector of kVec values of T in whole registers.
template <class T, int kVec>
using Packed = Vec<uint32_t, kVec * sizeof(T) / 4>;

/// Its values. Two bf16 of a register take one operation each; nvcc would move the upper half down before it shifts it.
template <class T, int N>
AK_DEVICE Vec<float, N * 4 / sizeof(T)> unpacked(const Vec<uint32_t, N>& words) {
  Vec<float, N * 4 / sizeof(T)> values;
  AK_UNROLL
  for (int i = 0; i < N; i++) {
    if constexpr (sizeof(T) == 4) {
      values[i] = float_of(words[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      values[2 * i] = float_of(words[i] << 16);
      values[2 * i + 1] = float_of(words[i] & 0xffff0000u);
    } else {
      values[2 * i] = to_float(T{static_cast<uint16_t>(words[i])});
      values[2 * i + 1] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
    }
  }
  return values;
}
template <class T, int N>
AK_DEVICE Packed<T, N> packed(const Vec<T, N>& v) {
  Packed<T, N> words;
  memcpy(words.data, v.data, sizeof words);
  return words;
}
template <class T, int N>
AK_DEVICE Vec<float, N> to_floats(const Vec<T, N>& v) {
  if constexpr (sizeof v % 4 == 0) {
    return unpacked<T>(packed(v));
  } else {
    static_assert(N == 1);
    return {{to_float(v[0])}};
  }
}

/// The column of this thread's first value. Its value `held`, the first of a vector, lies held * kThreads columns
/// further.
template <int kThreads, int kVec>
AK_DEVICE int first_column() {
  return thread_index() % kThreads * kVec;
}

/// Calls f(first held value, column) for this thread's vectors within a piece of `left` columns.
template <int kThreads, int kVec, int kColumns = kHeld, class F>
AK_DEVICE void for_each_held(int left, F f) {
  AK_UNROLL
  for (int k = 0; k < kColumns / kVec; k++) {
    const int column = first_column<kThreads, kVec>() + k * kVec * kThreads;
    if (column < left) f(k * kVec, column);
  }
}

/// values = the elements of `data` from `at` on, 0 beyond the `left` columns of the piece. All loads are issued before
/// the first is used.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void load_row(float (&values)[kColumns], const void* data, DType dtype, int64_t at, int left) {
  AK_UNROLL
  for (int j = 0; j < kColumns; j++) values[j] = 0.0f;
  with_row_dtype(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(data) + at + first_column<kThreads, kVec>();
    for_each_held<kThreads, kVec, kColumns>(left, [&](int held, int) {
      const auto v = to_floats(load_vec<kVec>(from + held * kThreads));
      AK_UNROLL
      for (int j = 0; j < kVec; j++) values[held + j] = v[j];
    });
  });
}

/// Rounds the values, in place, and stores them.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void store_row(float (&values)[kColumns], void* data, DType dtype, int64_t at, int left) {
  with_row_dtype(dtype, [&]<class T>(T) {
    T* to = static_cast<T*>(data) + at + first_column<kThreads, kVec>();
    for_each_held<kThreads, kVec, kColumns>(left, [&](int held, int) {
      Vec<T, kVec> v;
      AK_UNROLL
      for (int j = 0; j < kVec; j++) {
        v[j] = round_to<T>(values[held + j]);
        values[held + j] = to_float(v[j]);
      }
      store_vec(to + held * kThreads, v);
    });
  });
}

/// True if all rows of `columns` elements from `data` on can be read in vectors.
inline bool rows_aligned(const void* data, int columns) { return columns % kWideRow == 0 && vector_aligned(data); }

/// Calls f<threads of a block, columns of a vector, whether a block holds a whole row>.
template <class F>
Status with_row_shape(int columns, bool aligned, const F& f) {
  const auto with_vector = [&]<int kVec>() {
    if (columns <= 32 * kHeld) return f.template operator()<32, kVec, true>();
    if (columns <= 128 * kHeld) return f.template operator()<128, kVec, true>();
    if (columns <= 512 * kHeld) return f.template operator()<512, kVec, true>();
    return f.template operator()<512, kVec, false>();
  };
  return aligned ? with_vector.template operator()<kRowVec>() : with_vector.template operator()<1>();
}

}  // namespace ak
