// The largest of a row of logits and the sum of their exponentials, in 64 lanes that meet at the end: their order is
// that of the code, so the bits are the same for any number of threads and every instruction set.
//
// Short rows are worked on several together, for what a row costs whatever its length (calls, a logarithm, a division)
// to be paid once for all of them, or in the lanes of a vector. A row's bits are its own all the same.
#pragma once

#include <algorithm>

#include "math/cross_entropy.h"
#include "ops/cpu/row_sums.h"
#include "ops/cpu/tile.h"

namespace ak {

inline constexpr int64_t kRowsTogether = 16;
inline int64_t rows_together(int64_t columns) { return std::clamp<int64_t>(kTile / columns, 1, kRowsTogether); }

// A number for each row of a block. Loops over all of them, those without a row too, are vectors.
using PerRow = float[kRowsTogether];

// The sum of term(i) over i < n, as lanes_sum, but what is left over goes to the lanes, too, 16 of them at a time.
// Expanded into the clones that call it.
template <typename Terms, typename Term>
AK_SIMD_INLINE float sum_of_lanes(int64_t n, const Terms& terms, const Term& term) {
  Floats a{}, b{}, c{}, d{};
  int64_t i = add_lanes(n, terms, a, b, c, d);
  const auto add = [&](Floats& sum) __attribute__((always_inline)) {
    Floats t;
    if (i + kFloats <= n) {
      terms(i, t);
    } else {
      part_of_lanes(i, n, 0.0f, term, t);
    }
    sum += t;
    i += kFloats;
  };
  if (i < n) add(a);
  if (i < n) add(b);
  if (i < n) add(c);
  if (i < n) add(d);
  a += c, b += d;
  return lanes_total(a + b);
}

template <typename T>
AK_SIMD_INLINE float sum_of_row(const T* x, int64_t n) {
  return sum_of_lanes(
      n, [=](int64_t i, Floats& t) __attribute__((always_inline)) { load_floats(x + i, t); },
      [=](int64_t i) __attribute__((always_inline)) { return to_float(x[i]); });
}
template <typename T>
AK_SIMD_CLONES float sum_of_span(const T* x, int64_t n) {
  return sum_of_row(x, n);
}

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
    load_floats(from, v), take(v, most);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    take_at(x + i, a), take_at(x + i + kFloats, b), take_at(x + i + 2 * kFloats, c), take_at(x + i + 3 * kFloats, d);
  }
  for (; i + kFloats <= n; i += kFloats) take_at(x + i, a);
  if (i < n) {
    Floats v;
    part_of_lanes(i, n, kLeast, [=](int64_t at) __attribute__((always_inline)) { return x[at]; }, v), take(v, d);
  }
  a = a > b ? a : b;
  c = c > d ? c : d;
  return lanes_largest(a > c ? a : c);
}

// The sum of exp(x - base); `e`, which may be x, keeps the exponentials where kKeeps.
template <bool kKeeps>
AK_SIMD_INLINE float exp_row(const float* x, float base, float* e, int64_t n) {
  return sum_of_lanes(
      n,
      [=](int64_t i, Floats& t) __attribute__((always_inline)) {
        float own[kFloats];
        float* const to = kKeeps ? e + i : own;
#pragma GCC ivdep
        for (int64_t lane = 0; lane < kFloats; ++lane) to[lane] = exp_of_logit(x[i + lane] - base);
        load_floats(to, t);
      },
      [=](int64_t i) __attribute__((always_inline)) {
        const float value = exp_of_logit(x[i] - base);
        if constexpr (kKeeps) e[i] = value;
        return value;
      });
}

}  // namespace ak
