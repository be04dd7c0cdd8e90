// The maximum of a row of logits and the sum of their exponentials, in 64 lanes that are reduced at the end. The code
// fixes the order, so the bits are the same for any number of threads and every instruction set.
#pragma once

#include "base/cpu/row_sums.h"
#include "loss/exponential.h"

namespace ak {

// The maximum of each lane of a row, -inf for an empty lane; NaN is ignored.
template <typename Floats>
AK_SIMD_INLINE Floats largest_lanes(const float* x, int64_t n) {
  constexpr float kLeast = -__builtin_huge_valf();
  Floats a = all_lanes<Floats>(kLeast), b = a, c = a, d = a;
  const auto take_at = [&](const float* from, Floats& most) AK_ALWAYS_INLINE {
    Floats v;
    load_floats(from, v), most = of_parts(most, v, Larger{}), prefetch_ahead(from);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    take_at(x + i, a), take_at(x + i + kFloats, b), take_at(x + i + 2 * kFloats, c), take_at(x + i + 3 * kFloats, d);
  }
  for (; i + kFloats <= n; i += kFloats) take_at(x + i, a);
  if (i < n) {
    Floats v;
    float part[kFloats];
    part_of_lanes(x, i, n, kLeast, part), load_floats(part, v), d = of_parts(d, v, Larger{});
  }
  return of_parts(of_parts(a, b, Larger{}), of_parts(c, d, Larger{}), Larger{});
}

// The sum of 2^64 exp(x - base) in lanes. With kKeeps the exponentials are stored in `e`, which may alias x.
template <bool kKeeps, typename Floats>
AK_SIMD_INLINE Floats exp_lanes(const float* x, float base, float* e, int64_t n) {
  return lanes_of_sum<Floats>(
      n,
      [=](int64_t i, Floats& t) AK_ALWAYS_INLINE {
        load_floats(x + i, t);
        const auto exp_of = [=](float v) AK_ALWAYS_INLINE { return scaled_exp(logit_in_range(v - base)); };
        t = of_lanes(exp_of, t);
        if constexpr (kKeeps) {
          const auto unscaled = [](float v) AK_ALWAYS_INLINE { return v * kExpUnscale; };
          store_floats(of_lanes(unscaled, t), e + i);
        }
      },
      [=](int64_t i, float* rest) AK_ALWAYS_INLINE {
        const auto exp_of = [=](float v) AK_ALWAYS_INLINE { return scaled_exp(logit_in_range(v - base)); };
        make_rest(i, n, rest, exp_of, x);
        if constexpr (kKeeps) {
          float kept[kFloats];
#pragma GCC ivdep
#pragma GCC unroll 1
          for (int lane = 0; lane < kFloats; ++lane) kept[lane] = rest[lane] * kExpUnscale;
          store_rest(kept, e + i, n - i);
        }
      });
}
template <bool kKeeps, typename Floats>
AK_SIMD_INLINE float exp_row(const float* x, float base, float* e, int64_t n) {
  return lanes_total(exp_lanes<kKeeps, Floats>(x, base, e, n)) * kExpUnscale;
}

}  // namespace ak
