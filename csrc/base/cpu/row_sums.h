// Sums over a row of floats, in 64 lanes that are reduced at the end. The order does not depend on the vector width, so
// every version gives the same bits, and chains of dependent additions are short.
#pragma once

#include <cstdint>

#include "base/cpu/lanes.h"
#include "base/cpu/tile.h"

namespace ak {

inline constexpr int64_t kLanes = 64;

// Elements of a row that are summed in fp32; a longer row adds such sums in double, so that the error does not grow
// with its length.
inline constexpr int64_t kRowChain = 8 * kTile;

// Adds the terms of i < n that fill all 64 lanes and returns their number. terms(i, t) sets t to terms i to i + 15.
// Four named sums, since an indexed array would not stay in registers.
template <typename Floats, typename Terms>
AK_SIMD_INLINE int64_t add_lanes(int64_t n, const Terms& terms, Floats& a, Floats& b, Floats& c, Floats& d) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats t;
    terms(i, t), a = a + t;
    terms(i + kFloats, t), b = b + t;
    terms(i + 2 * kFloats, t), c = c + t;
    terms(i + 3 * kFloats, t), d = d + t;
  }
  return i;
}

// Loads elements i to end - 1, at most 16, and fills the rest with `instead`: a masked load if the CPU has it.
AK_SIMD_INLINE void part_of_lanes(const float* from, int64_t i, int64_t end, float instead, float* part) {
  const int count = static_cast<int>(end - i < kFloats ? end - i : kFloats);
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kFloats; ++lane) part[lane] = lane < count ? from[i + lane] : instead;
}

// The last elements of a row, fewer than 16: results[lane] = f(elements of the operands), with zeros out of bounds.
// Zeros, because f is also evaluated in masked lanes: stale bits there may be subnormal floats, which cost a hundred
// cycles per instruction.
template <typename F, typename... T>
AK_SIMD_INLINE void make_rest(int64_t i, int64_t end, float* results, const F& f, const T*... from) {
  const auto make = [=](const auto&... parts) __attribute__((always_inline)) {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kFloats; ++lane) results[lane] = f(parts.numbers[lane]...);
  };
  struct Part {
    float numbers[kFloats];
  };
  const auto part_of = [=](const auto* at) __attribute__((always_inline)) {
    Part part;
    part_of_lanes(at, i, end, 0.0f, part.numbers);
    return part;
  };
  make(part_of(from)...);
}
AK_SIMD_INLINE void store_rest(const float* results, float* to, int64_t count) {
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kFloats; ++lane) {
    if (lane < count) to[lane] = results[lane];
  }
}

// to[i] = f(from[i]...) for i < n: 32 at a time, then 16, then the rest under a mask. A
// plain loop would end in scalar steps. `to` may alias an operand. Inlined into the clones that call it. `ahead(i)` may
// prefetch.
template <typename Ahead, typename F, typename... T>
AK_SIMD_INLINE void map_lanes_ahead(int64_t n, const Ahead& ahead, float* to, const F& f, const T*... from) {
  constexpr int kHalves = 2 * kFloats;
  int64_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
    ahead(i);
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kHalves; ++lane) to[i + lane] = f(from[i + lane]...);
  }
  if (i + kFloats <= n) {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kFloats; ++lane) to[i + lane] = f(from[i + lane]...);
    i += kFloats;
  }
  if (i == n) return;
  float results[kFloats];
  make_rest(i, n, results, f, from...);
  store_rest(results, to + i, n - i);
}
template <typename F, typename... T>
AK_SIMD_INLINE void map_lanes(int64_t n, float* to, const F& f, const T*... from) {
  map_lanes_ahead(n, [](int64_t) {}, to, f, from...);
}

// Sum of n terms in 16 lanes: terms(i, t) sets t to terms i to i + 15; rest(i, results) computes the last terms from i
// on, fewer than 16, and may leave anything after them. Terms that do not fill 64 lanes are added 16 at a time.
template <typename Floats, typename Terms, typename Rest>
AK_SIMD_INLINE Floats lanes_of_sum(int64_t n, const Terms& terms, const Rest& rest) {
  Floats a = all_lanes<Floats>(0.0f), b = a, c = a, d = a;
  int64_t i = add_lanes(n, terms, a, b, c, d);
  const auto add = [&](Floats& sum) __attribute__((always_inline)) {
    Floats t;
    if (i + kFloats <= n) {
      terms(i, t);
    } else {
      float results[kFloats], part[kFloats];
      rest(i, results);
      part_of_lanes(results, 0, n - i, 0.0f, part);
      load_floats(part, t);
    }
    sum = sum + t;
    i += kFloats;
  };
  if (i < n) add(a);
  if (i < n) add(b);
  if (i < n) add(c);
  if (i < n) add(d);
  return (a + c) + (b + d);
}
template <typename Floats, typename Terms, typename Rest>
AK_SIMD_INLINE float sum_of_lanes(int64_t n, const Terms& terms, const Rest& rest) {
  return lanes_total(lanes_of_sum<Floats>(n, terms, rest));
}

inline float sum_of_span(const float* x, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    return sum_of_lanes<Floats>(
        n, [=](int64_t i, Floats& t) AK_ALWAYS_INLINE { load_floats(x + i, t), prefetch_ahead(x + i); },
        [=](int64_t i, float* rest) AK_ALWAYS_INLINE { part_of_lanes(x, i, n, 0.0f, rest); });
  });
}

inline float products_span(const float* y, const float* g, int64_t n) {
  return with_lanes([=]<typename Floats>() AK_ALWAYS_INLINE {
    const auto product = [](float grad, float own) AK_ALWAYS_INLINE { return grad * own; };
    return sum_of_lanes<Floats>(
        n,
        [=](int64_t i, Floats& t) AK_ALWAYS_INLINE {
          Floats other;
          load_floats(g + i, t), load_floats(y + i, other), t = of_lanes(product, t, other);
          prefetch_ahead(g + i), prefetch_ahead(y + i);
        },
        [=](int64_t i, float* rest) AK_ALWAYS_INLINE { make_rest(i, n, rest, product, g, y); });
  });
}

// results[r] = the lanes of_row(r) reduced by op, for r < rows. Four rows share the last steps.
template <typename OfRow, typename Op>
AK_SIMD_INLINE void join_rows(int64_t rows, float* results, const OfRow& of_row, const Op& op) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    Four fours[4];
#pragma GCC unroll 1
    for (int k = 0; k < 4; ++k) fours[k] = four_of(of_row(r + k), op);
    const Four joined = fours_joined(fours[0], fours[1], fours[2], fours[3], op);
    std::memcpy(results + r, &joined, sizeof joined);
  }
  for (; r < rows; ++r) results[r] = lanes_joined(of_row(r), op);
}

}  // namespace ak
