#pragma once
// Dropout of values that the threads of a row hold: the mask of dropout/dropout.cu.
#include "base/row.cuh"
#include "dropout/formula.h"

namespace ak {

/// Dropout of kVec values, the first of which is `element` of the tensor. A vector of whole groups begins with a group.
template <int kVec>
AK_DEVICE void drop_vector(float* values, uint64_t seed, DropoutRate rate, uint64_t element) {
  if constexpr (kVec % kDropoutGroup == 0) {
    AK_UNROLL
    for (int j = 0; j < kVec; j += kDropoutGroup) {
      const Philox4 bits = dropout_bits(seed, (element + j) / kDropoutGroup);
      AK_UNROLL
      for (int k = 0; k < kDropoutGroup; k++) values[j + k] = dropped_out(values[j + k], bits.word[k], rate);
    }
  } else {
    static_assert(kVec == 1);
    values[0] = dropped_out(values[0], dropout_word(seed, element), rate);
  }
}

/// Dropout of a piece of a row that begins with element `at` of the tensor.
template <int kThreads, int kVec, int kColumns>
AK_DEVICE void drop_row(float (&values)[kColumns], const DropoutMask& mask, int64_t at, int left) {
  if (mask.seed == nullptr) return;
  const uint64_t seed = static_cast<uint64_t>(load(mask.seed));
  for_each_held<kThreads, kVec, kColumns>(left, [&](int held, int column) {
    drop_vector<kVec>(values + held, seed, mask.rate, static_cast<uint64_t>(at) + column);
  });
}

}  // namespace ak
