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

/// Also the sum of (x - maximum) exp(x - maximum), whose terms are 0 at -inf.
struct RunningMoment : RunningSum {
  float moment = 0.0f;

  template <int N, class F>
  AK_DEVICE void add(F value, bool with_moment) {
    const RunningMoment before = *this;
    RunningSum::add<N>(value);
    if (!with_moment) return;
    const float base = finite_base(largest);
    float added = 0.0f;
    AK_UNROLL
    for (int j = 0; j < N; j++) added = fma(exp_above(value(j), base), logit_in_range(value(j) - base), added);
    moment = added + before.moment_relative_to(base);
  }
  AK_DEVICE float moment_relative_to(float base) const {
    return fma(logit_in_range(largest - base), sum, moment) * exp_above(largest, base);
  }
};

}  // namespace ak
