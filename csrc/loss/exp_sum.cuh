#pragma once
// The sum of the exponentials of a row, relative to its largest value, in one read (Milakov and Gimelshein,
// arXiv:1805.02867).
#include <cmath>

#include "device/approx.cuh"
#include "loss/exponential.h"

namespace ak {

/// exp(x - base) by the special function unit; base is finite.
AK_DEVICE float exp_above(float x, float base) { return exp2_approx((x - base) * 1.4426950408889634f); }

/// The maximum of a thread's share of a row, and the sum of exp(x - maximum), rescaled whenever the maximum grows.
struct RunningSum {
  float largest = -HUGE_VALF, sum = 0.0f;

  /// Adds value(0) to value(N - 1).
  template <int N, class F>
  AK_DEVICE void add(F value) {
    float top = largest;
    AK_UNROLL
    for (int j = 0; j < N; j++) top = max_number(value(j), top);
    const float base = finite_base(top);  // 0 if all are -inf: their exponentials are then 0
    float added = 0.0f;
    AK_UNROLL
    for (int j = 0; j < N; j++) added += exp_above(value(j), base);
    sum = fma(sum, exp_above(largest, base), added);
    largest = top;
  }
  /// The sum of exp(x - base) for a base of at least the maximum; 0 for a share of nothing but -inf, whatever the base.
  AK_DEVICE float relative_to(float base) const { return sum * exp_above(largest, base); }
};

}  // namespace ak
