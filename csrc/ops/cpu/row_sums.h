// Sums over a row of floats, in 64 lanes that meet at the end: their order is that of the code, not of the machine's
// vectors, so every clone gives the same bits; and the additions of one lane, which wait for each other, are few.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/half.h"
#include "ops/cpu/simd.h"

namespace ak {

inline constexpr int64_t kLanes = 64;
using Floats = float __attribute__((vector_size(64)));  // 16 of them: a vector of the machine, or several
inline constexpr int64_t kFloats = 16;

// Each lane plus the one half a vector further, until one is left.
inline __attribute__((always_inline)) float lanes_total(const Floats& sums) {
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
  Eight halves[2];
  std::memcpy(halves, &sums, sizeof sums);
  const Eight eight = halves[0] + halves[1];
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const Four four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Adds the terms of i < n, as far as they fill all lanes, and returns how many that are. terms(i, t) makes t those of i
// to i + 15. Four sums in registers, which an array that is indexed would not be.
template <typename Terms>
inline __attribute__((always_inline)) int64_t add_lanes(int64_t n, const Terms& terms, Floats& a, Floats& b, Floats& c,
                                                        Floats& d) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats t;
    terms(i, t), a += t;
    terms(i + kFloats, t), b += t;
    terms(i + 2 * kFloats, t), c += t;
    terms(i + 3 * kFloats, t), d += t;
  }
  return i;
}

// Calls body(i) for i < n: 32 at a time, a vector of 16-bit numbers, then 16, and the rest under a mask, where the
// machine has that; a loop over i alone ends in steps of one. Bodies of different i must not touch the same memory.
// Expanded into the clones that call it.
template <typename Body>
inline __attribute__((always_inline)) void for_lanes(int64_t n, const Body& body) {
  constexpr int kHalves = 2 * kFloats;
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kHalves; ++lane) body(i + lane);
  }
  if (i + kFloats <= n) {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kFloats; ++lane) body(i + lane);
    i += kFloats;
  }
  const int count = static_cast<int>(n - i);
  if (count == 0) return;
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kFloats; ++lane) {
    if (lane < count) body(i + lane);
  }
}

// term(i), ..., term(end - 1), at most 16 of them, with `instead` behind them. One masked load where the machine has
// it.
template <typename Term>
inline __attribute__((always_inline)) void part_of_lanes(int64_t i, int64_t end, float instead, const Term& term,
                                                         Floats& t) {
  const int count = static_cast<int>(end - i < kFloats ? end - i : kFloats);
  float part[kFloats];
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kFloats; ++lane) part[lane] = lane < count ? term(i + lane) : instead;
  std::memcpy(&t, part, sizeof t);
}

inline __attribute__((always_inline)) void load_floats(const float* at, Floats& v) { std::memcpy(&v, at, sizeof v); }
inline __attribute__((always_inline)) void load_floats(const bf16* at, Floats& v) {
  uint16_t __attribute__((vector_size(32))) bits;
  std::memcpy(&bits, at, sizeof bits);
  using Words = uint32_t __attribute__((vector_size(64)));
  const Words words = __builtin_convertvector(bits, Words) << 16;
  std::memcpy(&v, &words, sizeof v);
}

// A line that the first pass over a row will need soon; a hint that may point behind the last row. One at a time
// between the numbers: many at once wait for each other, and what follows for them.
template <typename T>
AK_SIMD_INLINE void prefetch_ahead(const T* at) {
  constexpr int kBytes = 2048;
  __builtin_prefetch(reinterpret_cast<const char*>(at) + kBytes);
}

// The sum of term(i) over i < n. What does not fill all lanes goes to 16 of them at a time. Expanded into the clones
// that call it.
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
      n, [=](int64_t i, Floats& t) __attribute__((always_inline)) { load_floats(x + i, t), prefetch_ahead(x + i); },
      [=](int64_t i) __attribute__((always_inline)) { return to_float(x[i]); });
}
template <typename T>
AK_SIMD_CLONES float sum_of_span(const T* x, int64_t n) {
  return sum_of_row(x, n);
}

}  // namespace ak
