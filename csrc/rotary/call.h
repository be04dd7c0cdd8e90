// Rotary embedding of queries and keys, optionally after an RMS norm of each head: its calls and the formula. Each pair
// of elements of a head turns by an angle that depends on the token's position. J. Su et al., "RoFormer: Enhanced
// transformer with rotary position embedding", arXiv:2104.09864.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "norm/formula.h"

namespace ak {

inline constexpr int kMaxHeadWidth = 256;

/// A tensor [batch, tokens, heads, width] whose columns are contiguous. The stride of a dimension of size 1 is 0.
struct HeadRows {
  const void* data;
  int64_t strides[3];

  AK_HD int64_t at(int64_t batch, int64_t token, int head) const {
    return batch * strides[0] + token * strides[1] + head * strides[2];
  }
};

/// Queries or keys.
struct RotaryHeads {
  HeadRows in;         // forward: the heads; backward: the gradient of the result
  HeadRows x;          // backward of a norm: the heads
  const void* weight;  // [width], of the norm; null: no norm
  void* out;           // dense
  int heads;
};

/// Types are fp16, bf16 or fp32.
struct Rotary {
  RotaryHeads sides[2];   // queries, keys; both have a weight or none
  const void *cos, *sin;  // dense, [tokens, rotary] or [batch, tokens, rotary]
  float *slots,
      *sums;  // backward of a norm: scratch of rotary_backward_slots floats; gradients of the weights, [2, width]
  DType in_type, x_type, weight_type, angle_type, out_type;
  int64_t batch, tokens;
  int64_t angle_batch;  // elements between batches of cos and sin; 0: all batches share them
  int width, rotary;    // even, 0 < rotary <= width <= kMaxHeadWidth; columns from `rotary` on do not turn
  float eps;
  bool interleaved;  // pairs are neighbours; otherwise `rotary / 2` columns apart

  AK_HD int64_t rows() const { return batch * tokens; }
};

Status rotary_forward(const Rotary& call, Stream stream);

/// Floats of scratch on the current device; the CPU needs none.
int64_t rotary_backward_slots(int64_t rows, int width);
/// The bits of the weights' gradients depend on values, types, shape, alignments and the device alone.
Status rotary_backward(const Rotary& call, Stream stream);

// ---- formula

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
