// Dropout whose mask is a function of a seed and of the element's position, so that backward recomputes it from the
// seed alone. G. E. Hinton et al., "Improving neural networks by preventing co-adaptation of feature detectors",
// arXiv:1207.0580.
#pragma once

#include "base/philox.h"

namespace ak {

// Elements that share a call of the generator.
inline constexpr int kDropoutGroup = 4;

// An element is dropped if its 24 random bits are below `threshold`: with probability p to within 2^-25, exactly for
// p = 0 and p = 1. Kept elements are multiplied by `scale`, 1 / (1 - p).
struct DropoutRate {
  uint32_t threshold;
  float scale;
};

// The mask of a tensor. The kernel reads the seed, so that a replayed CUDA graph draws a new mask. Null: no dropout.
struct DropoutMask {
  const int64_t* seed;
  DropoutRate rate;
};

// Host only. 0 <= p <= 1.
inline DropoutRate dropout_rate(double p) {
  return {static_cast<uint32_t>(p * 0x1p24 + 0.5), p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f};
}

// Word k belongs to element kDropoutGroup * group + k.
AK_HD Philox4 dropout_bits(uint64_t seed, uint64_t group) {
  return philox4x32_10({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), 0, 0}}, seed);
}

// The word of one element.
AK_HD uint32_t dropout_word(uint64_t seed, uint64_t element) {
  const Philox4 bits = dropout_bits(seed, element / kDropoutGroup);
  const uint32_t low = element & 1 ? bits.word[1] : bits.word[0], high = element & 1 ? bits.word[3] : bits.word[2];
  return element & 2 ? high : low;
}

// Selects, so that a dropped infinity or NaN becomes 0.
AK_HD float dropped_out(float x, uint32_t word, DropoutRate rate) {
  return (word >> 8) < rate.threshold ? 0.0f : x * rate.scale;
}

}  // namespace ak
