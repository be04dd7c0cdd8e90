// The largest of a row of logits and the sum of their exponentials, in 64 lanes that meet at the end: their order is
// that of the code, so the bits are the same for any number of threads and every instruction set.
#pragma once

#include "math/cross_entropy.h"
#include "ops/cpu/row_sums.h"

namespace ak {

// The largest of each lane and the one half a vector further, until one is left.
AK_SIMD_INLINE float lanes_largest(const Floats& lanes) {
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
  Eight halves[2];
  std::memcpy(halves, &lanes, sizeof lanes);
  const Eight eight = halves[1] > halves[0] ? halves[1] : halves[0];
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const Four four = quarters[1] > quarters[0] ? quarters[1] : quarters[0];
  const float even = four[2] > four[0] ? four[2] : four[0], odd = four[3] > four[1] ? four[3] : four[1];
  return odd > even ? odd : even;
}

// The largest of a row, -inf where there is none; a NaN is passed over.
AK_SIMD_INLINE float largest_of_row(const float* x, int64_t n) {
  constexpr float kLeast = -__builtin_huge_valf();
  Floats a = Floats{} + kLeast, b = a, c = a, d = a;
  const auto take = [](const Floats& v, Floats& most) __attribute__((always_inline)) { most = v > most ? v : most; };
  const auto take_at = [&](const float* from, Floats& most) __attribute__((always_inline)) {
    Floats v;
    load_floats(from, v), take(v, most), prefetch_ahead(from);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    take_at(x + i, a), take_at(x + i + kFloats, b), take_at(x + i + 2 * kFloats, c), take_at(x + i + 3 * kFloats, d);
  }
  for (; i + kFloats <= n; i += kFloats) take_at(x + i, a);
  if (i < n) {
    Floats v;
    float part[kFloats];
    part_of_lanes(x, i, n, kLeast, part), load_floats(part, v), take(v, d);
  }
  a = a > b ? a : b;
  c = c > d ? c : d;
  return lanes_largest(a > c ? a : c);
}

// The sum of exp(x - base), taken of 2^64 exp(x - base); `e`, which may be x, keeps the exponentials where kKeeps.
template <bool kKeeps>
AK_SIMD_INLINE float exp_row(const float* x, float base, float* e, int64_t n) {
  const float sum = sum_of_lanes(
      n,
      [=](int64_t i, Floats& t) __attribute__((always_inline)) {
        load_floats(x + i, t), t -= base;
        const Floats least = Floats{} + kLeastLogit;
        t = least > t ? least : t;  // of vectors it is one instruction, which leaves NaN alone
        float moved[kFloats], own[kFloats];
        store_floats(t, moved);
#pragma GCC ivdep
        for (int64_t lane = 0; lane < kFloats; ++lane) own[lane] = scaled_exp(moved[lane]);
        load_floats(own, t);
        if constexpr (kKeeps) store_floats(t * kExpUnscale, e + i);
      },
      [=](int64_t i, float* rest) __attribute__((always_inline)) {
        const auto exp_of = [=](float v)
                                __attribute__((always_inline)) { return scaled_exp(logit_in_range(v - base)); };
        make_rest(i, n, rest, exp_of, x);
        if constexpr (kKeeps) {
          float kept[kFloats];
#pragma GCC ivdep
          for (int64_t lane = 0; lane < kFloats; ++lane) kept[lane] = rest[lane] * kExpUnscale;
          store_rest(kept, e + i, n - i);
        }
      });
  return sum * kExpUnscale;
}

}  // namespace ak
