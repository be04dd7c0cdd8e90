// Dropout whose mask is a function of a seed and of an element's place, so that backward makes it again: nothing is
// stored but the seed. G. E. Hinton et al., "Improving neural networks by preventing co-adaptation of feature
// detectors", arXiv:1207.0580.
#pragma once

#include "base/philox.h"

namespace ak {

// Elements share a call of the generator.
inline constexpr int kDropoutGroup = 4;

// An element is dropped where its 24 random bits are below `threshold`, so with probability p to within 2^-25, and
// exactly for p = 0 and p = 1; what is kept is multiplied by `scale`, 1 / (1 - p).
struct DropoutRate {
  uint32_t threshold;
  float scale;
};

// The mask of a tensor, whose seed is read where it is used: a replayed CUDA graph draws a new one. No seed is null.
struct DropoutMask {
  const int64_t* seed;
  DropoutRate rate;
};

// Host only. 0 <= p <= 1.
inline DropoutRate dropout_rate(double p) {
  return {static_cast<uint32_t>(p * 0x1p24 + 0.5), p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f};
}

// Word k is that of element kDropoutGroup * group + k.
AK_HD Philox4 dropout_bits(uint64_t seed, uint64_t group) {
  return philox4x32_10({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), 0, 0}}, seed);
}

// The word of one element.
AK_HD uint32_t dropout_word(uint64_t seed, uint64_t element) {
  const Philox4 bits = dropout_bits(seed, element / kDropoutGroup);
  const uint32_t low = element & 1 ? bits.word[1] : bits.word[0], high = element & 1 ? bits.word[3] : bits.word[2];
  return element & 2 ? high : low;
}

// Chooses, so that nothing is left of an infinite or NaN element that is dropped.
AK_HD float dropped_out(float x, uint32_t word, DropoutRate rate) {
  return (word >> 8) < rate.threshold ? 0.0f : x * rate.scale;
}

}  // namespace ak
