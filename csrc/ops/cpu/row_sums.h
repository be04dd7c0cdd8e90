// Sums over a row of floats, in 64 lanes that meet at the end: their order is that of the code, not of the machine's
// vectors, so every clone gives the same bits; and the additions of one lane, which wait for each other, are few.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/cpu/simd.h"

namespace ak {

inline constexpr int64_t kLanes = 64;
using Floats = float __attribute__((vector_size(64)));  // 16 of them: a vector of the machine, or several
inline constexpr int64_t kFloats = 16;

inline __attribute__((always_inline)) float lanes_total(const Floats& sums) {
  float lanes[kFloats];
  std::memcpy(lanes, &sums, sizeof lanes);
  for (int64_t half = kFloats / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// The sum of term(i) over i < n; term_of_vector(i) gives those of i to i + 15. Expanded into the clones that call it.
template <typename Terms, typename Term>
inline __attribute__((always_inline)) float lanes_sum(int64_t n, const Terms& terms, const Term& term) {
  Floats a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats t;
    terms(i, t), a += t;
    terms(i + kFloats, t), b += t;
    terms(i + 2 * kFloats, t), c += t;
    terms(i + 3 * kFloats, t), d += t;
  }
  a += b, c += d, a += c;
  Floats rest{};
  for (int64_t lane = 0; i < n; ++i, ++lane) rest[lane % kFloats] += term(i);
  return lanes_total(a + rest);
}

inline __attribute__((always_inline)) void load_floats(const float* at, Floats& v) { std::memcpy(&v, at, sizeof v); }

AK_SIMD_CLONES inline float row_sum(const float* x, int64_t n, float factor) {
  return lanes_sum(
      n, [=](int64_t i, Floats& t) { load_floats(x + i, t), t *= factor; }, [=](int64_t i) { return x[i] * factor; });
}

AK_SIMD_CLONES inline float row_sum_of_squares(const float* x, int64_t n, float factor, float mean) {
  return lanes_sum(
      n, [=](int64_t i, Floats& t) { load_floats(x + i, t), t = t * factor - mean, t *= t; },
      [=](int64_t i) {
        const float centred = x[i] * factor - mean;
        return centred * centred;
      });
}

}  // namespace ak
