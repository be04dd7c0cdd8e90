// The calls of rotary embedding of queries and keys, optionally after an RMS norm of each head, and of its gradient.
#pragma once
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"
#include "rotary/formula.h"

namespace ak {

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

}  // namespace ak
