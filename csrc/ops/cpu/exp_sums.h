// The largest of a row of logits and the sum of their exponentials, in 64 lanes that meet at the end: their order is
// that of the code, so the bits are the same for any number of threads and every instruction set.
#pragma once

#include "math/cross_entropy.h"
#include "ops/cpu/simd.h"

namespace ak {

inline constexpr int64_t kExpLanes = 64;

template <typename Each>
AK_HD float sum_of_lanes(int64_t n, const Each& each) {
  float lanes[kExpLanes] = {};
  int64_t i = 0;
  for (; i + kExpLanes <= n; i += kExpLanes) {
    for (int64_t lane = 0; lane < kExpLanes; ++lane) lanes[lane] += each(i + lane);
  }
  for (int64_t lane = 0; i + lane < n; ++lane) lanes[lane] += each(i + lane);
  for (int64_t half = kExpLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

AK_SIMD_CLONES inline float largest_of_span(const float* __restrict x, int64_t n, float largest) {
  float lanes[kExpLanes];
  for (int64_t lane = 0; lane < kExpLanes; ++lane) lanes[lane] = largest;
  int64_t i = 0;
  for (; i + kExpLanes <= n; i += kExpLanes) {
    for (int64_t lane = 0; lane < kExpLanes; ++lane)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t lane = 0; lane < kExpLanes; ++lane) largest = lanes[lane] > largest ? lanes[lane] : largest;
  return largest;
}

// e may be x.
AK_SIMD_CLONES inline float exp_span(const float* x, float largest, float* e, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) e[i] = exp_of_logit(x[i] - largest);
  return sum_of_lanes(n, [=](int64_t i) { return e[i]; });
}

}  // namespace ak
