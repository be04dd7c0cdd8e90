// 16 float lanes in vectors of the CPU's width, selected at run time.
//
// Sums over a row use 16 lanes on every CPU, so that their order does not depend on it. gcc 12 keeps vectors wider than
// the CPU's in memory and compares them element by element (5 cycles each), so kernels are templates over Lanes<16>,
// <8> and <4>; with_lanes compiles all of them and calls the one that fits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/cpu/isa.h"
#include "base/cpu/simd.h"
#include "base/half.h"

// The ABI warning does not apply: functions that return vectors are always inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace ak {

inline constexpr int64_t kFloats = 16;

// Vector types by specialization: gcc drops a vector_size that depends on a template parameter.
template <int kWidth>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Floats = float __attribute__((vector_size(64)));
};
template <>
struct VectorOf<8> {
  using Floats = float __attribute__((vector_size(32)));
};
template <>
struct VectorOf<4> {
  using Floats = float __attribute__((vector_size(16)));
};

template <int kWidth>
struct Lanes {
  using Vector = typename VectorOf<kWidth>::Floats;
  static constexpr int kParts = kFloats / kWidth;
  Vector part[kParts];
};
using Four = VectorOf<4>::Floats;

// Calls f with the index of each part as a constant: a loop is unrolled too late to keep the parts in registers.
template <int kParts, typename F>
AK_SIMD_INLINE void each_part(const F& f) {
  f(std::integral_constant<int, 0>{});
  if constexpr (kParts > 1) f(std::integral_constant<int, 1>{});
  if constexpr (kParts > 2) f(std::integral_constant<int, 2>{}), f(std::integral_constant<int, 3>{});
}

template <int kWidth>
AK_SIMD_INLINE void load_floats(const float* at, Lanes<kWidth>& v) {
  each_part<Lanes<kWidth>::kParts>(
      [&](auto p) __attribute__((always_inline)) { std::memcpy(&v.part[p], at + p * kWidth, sizeof v.part[p]); });
}
template <int kWidth>
AK_SIMD_INLINE void store_floats(const Lanes<kWidth>& v, float* at) {
  each_part<Lanes<kWidth>::kParts>(
      [&](auto p) __attribute__((always_inline)) { std::memcpy(at + p * kWidth, &v.part[p], sizeof v.part[p]); });
}

template <typename Floats>
AK_SIMD_INLINE Floats all_lanes(float x) {
  Floats v;
  each_part<Floats::kParts>([&](auto p) __attribute__((always_inline)) { v.part[p] = typename Floats::Vector{} + x; });
  return v;
}

// op applied to each part of a and b.
template <int kWidth, typename Op>
AK_SIMD_INLINE Lanes<kWidth> of_parts(const Lanes<kWidth>& a, const Lanes<kWidth>& b, const Op& op) {
  Lanes<kWidth> result;
  each_part<Lanes<kWidth>::kParts>([&](auto p)
                                       __attribute__((always_inline)) { result.part[p] = op(a.part[p], b.part[p]); });
  return result;
}
struct Add {
  template <typename V>
  AK_SIMD_INLINE V operator()(const V& a, const V& b) const {
    return a + b;
  }
};
struct Larger {  // a if b is NaN
  template <typename V>
  AK_SIMD_INLINE V operator()(const V& a, const V& b) const {
    return b > a ? b : a;
  }
};
template <int kWidth>
AK_SIMD_INLINE Lanes<kWidth> operator+(const Lanes<kWidth>& a, const Lanes<kWidth>& b) {
  return of_parts(a, b, Add{});
}

// f applied per lane: a scalar formula, vectorized for one vector at a time.
template <int kWidth, typename F, typename... V>
AK_SIMD_INLINE Lanes<kWidth> of_lanes(const F& f, const Lanes<kWidth>& first, const V&... more) {
  struct Numbers {
    float lane[kWidth];
  };
  Lanes<kWidth> result;
  const auto numbers_of = [](const auto& vector) __attribute__((always_inline)) {
    Numbers numbers;
    std::memcpy(&numbers, &vector, sizeof numbers);
    return numbers;
  };
  const auto make = [&](auto p, const auto&... numbers) __attribute__((always_inline)) {
    Numbers made;
#pragma GCC ivdep
#pragma GCC unroll 1
    for (int lane = 0; lane < kWidth; ++lane) made.lane[lane] = f(numbers.lane[lane]...);
    std::memcpy(&result.part[p], &made, sizeof made);
  };
  each_part<Lanes<kWidth>::kParts>(
      [&](auto p) __attribute__((always_inline)) { make(p, numbers_of(first.part[p]), numbers_of(more.part[p])...); });
  return result;
}

// Reduces the lanes by op to four, halving their number: lane i with lane i + half.
template <int kWidth, typename Op>
AK_SIMD_INLINE Four four_of(const Lanes<kWidth>& v, const Op& op) {
  if constexpr (kWidth == 4) {
    return op(op(v.part[0], v.part[2]), op(v.part[1], v.part[3]));
  } else {
    using Eight = VectorOf<8>::Floats;
    Eight halves[2];
    std::memcpy(halves, &v, sizeof halves);
    const Eight eight = op(halves[0], halves[1]);
    Four quarters[2];
    std::memcpy(quarters, &eight, sizeof quarters);
    return op(quarters[0], quarters[1]);
  }
}
// Reduces the four lanes of four rows, each in the order of lanes_joined.
template <typename Op>
AK_SIMD_INLINE Four fours_joined(const Four& a, const Four& b, const Four& c, const Four& d, const Op& op) {
  const Four ab = op(Four{a[0], a[1], b[0], b[1]}, Four{a[2], a[3], b[2], b[3]});
  const Four cd = op(Four{c[0], c[1], d[0], d[1]}, Four{c[2], c[3], d[2], d[3]});
  return op(Four{ab[0], ab[2], cd[0], cd[2]}, Four{ab[1], ab[3], cd[1], cd[3]});
}
template <int kWidth, typename Op>
AK_SIMD_INLINE float lanes_joined(const Lanes<kWidth>& v, const Op& op) {
  const Four four = four_of(v, op);
  return op(op(four[0], four[2]), op(four[1], four[3]));
}
template <int kWidth>
AK_SIMD_INLINE float lanes_total(const Lanes<kWidth>& v) {
  return lanes_joined(v, Add{});
}

#if AK_X86 && AK_HAS_SIMD_CLONES
template <typename Body>
__attribute__((target("arch=x86-64-v4"))) auto on_512_bits(const Body& from) {
  const Body body = from;
  return body.template operator()<Lanes<16>>();
}
template <typename Body>
__attribute__((target("arch=x86-64-v3"))) auto on_256_bits(const Body& from) {
  const Body body = from;
  return body.template operator()<Lanes<8>>();
}
#endif

// Calls body.operator()<Floats>(), compiled for each vector width. The body is an always_inline lambda that captures by
// value; each version copies it, so that its captures stay in registers.
template <typename Body>
auto with_lanes(const Body& body) {
#if AK_X86 && AK_HAS_SIMD_CLONES
  const int bits = vector_bits();
  if (bits == 512) return on_512_bits(body);
  if (bits == 256) return on_256_bits(body);
#endif
  return body.template operator()<Lanes<4>>();
}

}  // namespace ak
