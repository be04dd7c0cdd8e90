// Rotary position embedding: each pair of elements of a head turns by an angle that depends on the token's position.
// J. Su et al., "RoFormer: Enhanced transformer with rotary position embedding", arXiv:2104.09864. In front of it, each
// head may pass an RMS norm over its elements (norm/formula.h).
#pragma once

#include "norm/formula.h"

namespace ak {

inline constexpr int kMaxHeadWidth = 256;

// Signed sines of a pair: both elements then have one formula. The gradient turns by the transposed matrix. Cosine and
// sine are given per element, so that they may differ within a pair.
struct PairSines {
  float first, second;
};
AK_HD PairSines pair_sines(float first, float second, bool transposed) {
  return transposed ? PairSines{second, -first} : PairSines{-first, second};
}

// An element of a pair, whose other one is `other`.
AK_HD float turned(float x, float other, float cos, float signed_sin) { return fma(other, signed_sin, x * cos); }

AK_HD float normed(float x, float rstd, float weight) { return normalized(x, 0.0f, rstd) * weight; }

}  // namespace ak
