#pragma once
// A row of a matrix in the registers of kThreads threads, a block or one of its warps: thread t of them holds the
// vectors t, t + kThreads, ... of a piece of the row. A row that is longer than they can hold is walked piece by piece.
#include <cstdint>

#include "device/block.cuh"
#include "device/memory.cuh"
#include "device/tensor_list.cuh"
#include "math/dropout.h"
#include "math/half.h"

namespace ak {

inline constexpr int kWord = 16;  ///< bytes of an access

inline constexpr int kHeld = 16;    ///< columns that a thread of a block holds
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

/// The column of the first value that this thread holds; value `held`, the first of a vector, is that of the column
/// held * kThreads further.
template <int kThreads, int kVec>
AK_DEVICE int first_column() {
  return thread_index() % kThreads * kVec;
}

/// Calls f(first held value, column) for the vectors of this thread of which a piece with `left` columns has any.
template <int kThreads, int kVec, int kColumns = kHeld, class F>
AK_DEVICE void for_each_held(int left, F f) {
  AK_UNROLL
  for (int k = 0; k < kColumns / kVec; k++) {
    const int column = first_column<kThreads, kVec>() + k * kVec * kThreads;
    if (column < left) f(k * kVec, column);
  }
}

/// values = the elements of `data` from `at` on, 0 beyond the `left` columns of the piece. All loads are on their way
/// before the first is waited for.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void load_row(float (&values)[kColumns], const void* data, DType dtype, int64_t at, int left) {
  AK_UNROLL
  for (int j = 0; j < kColumns; j++) values[j] = 0.0f;
  with_row_dtype(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(data) + at + first_column<kThreads, kVec>();
    for_each_held<kThreads, kVec, kColumns>(left, [&](int held, int) {
      const auto v = load_vec<kVec>(from + held * kThreads);
      AK_UNROLL
      for (int j = 0; j < kVec; j++) values[held + j] = to_float(v[j]);
    });
  });
}

/// Rounds the values and stores them; they become what was stored.
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

/// Dropout of the values, of which the row's first is element `at` of the tensor: the mask of kernels/dropout.cu. In
/// vectors of whole groups `at` begins a group.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void drop_row(float (&values)[kColumns], const DropoutMask& mask, int64_t at, int left) {
  if (mask.seed == nullptr) return;
  const uint64_t seed = static_cast<uint64_t>(load(mask.seed));
  for_each_held<kThreads, kVec, kColumns>(left, [&](int held, int column) {
    const uint64_t element = static_cast<uint64_t>(at) + column;
    if constexpr (kVec % kDropoutGroup == 0) {
      AK_UNROLL
      for (int j = 0; j < kVec; j += kDropoutGroup) {
        const Philox4 bits = dropout_bits(seed, (element + j) / kDropoutGroup);
        AK_UNROLL
        for (int k = 0; k < kDropoutGroup; k++)
          values[held + j + k] = dropped_out(values[held + j + k], bits.word[k], mask.rate);
      }
    } else {
      static_assert(kVec == 1);
      values[held] = dropped_out(values[held], dropout_word(seed, element), mask.rate);
    }
  });
}

/// Whether rows of `columns` elements from `data` on can be read in vectors.
inline bool rows_aligned(const void* data, int columns) { return columns % kWideRow == 0 && vector_aligned(data); }

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
