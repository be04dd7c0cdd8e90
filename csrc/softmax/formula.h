// Softmax and log-softmax of a row, and their gradients, in fp32:
//   y_j = e_j / sum e      log y_j = (x_j - m) - log sum e      e_j = exp(x_j - m), m the largest of the row
//   dx_j = y_j (dy_j - sum_k dy_k y_k)     of log-softmax: dx_j = dy_j - y_j sum_k dy_k
// Masked elements have the value -inf. A fully masked row has no m; its result is NaN, as in torch, or with `safe`
// softmax 0 and log-softmax -inf. A NaN makes its row NaN either way. Masked elements have the gradient 0, even if
// their y is NaN.
#pragma once

#include "loss/formula.h"

namespace ak {

inline constexpr float kMasked = -__builtin_huge_valf();

// The subtrahend of x: m, or 0 for a fully masked row, so that e is 0 and not NaN.
AK_HD float softmax_base(float largest) { return largest == kMasked ? 0.0f : largest; }

// The results of one pass over a row.
struct SoftmaxRow {
  float base;
  float inverse;  // 1 / sum e
  float log_sum;
};

AK_HD SoftmaxRow softmax_row(float largest, float sum, bool safe) {
  const float nothing = safe ? 0.0f : float_of(0x7fc00000u);
  const bool empty = sum == 0.0f;  // the largest element alone makes it 1
  return {softmax_base(largest), empty ? nothing : div(1.0f, sum), empty ? nothing : log_positive(sum)};
}

AK_HD float softmax_of(const SoftmaxRow& row, float e) { return e * row.inverse; }
AK_HD float log_softmax_of(const SoftmaxRow& row, float x) { return (x - row.base) - row.log_sum; }

AK_HD float softmax_gradient(float y, float grad, float sum_grad_y) { return y * (grad - sum_grad_y); }
AK_HD float log_softmax_gradient(float y, float grad, float sum_grad) { return fma(-y, sum_grad, grad); }

}  // namespace ak
