// 16 floats in as many vectors as the machine takes for them, and the choice of that machine when the program runs.
//
// Sums over a row go over lanes, so that their order is that of the code and not of the machine. A vector of 16 floats
// that the machine does not have would be kept in memory and compared number by number (gcc 12: 5 cycles a number), so
// kernels are templates over Lanes<16>, <8> and <4>, and with_lanes compiles them for each and calls the one that fits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/cpu/simd.h"
#include "base/half.h"
#include "gemm/cpu/isa.h"

// Vectors are returned by functions that are always expanded: none is passed as the warning has it.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace ak {

inline constexpr int64_t kFloats = 16;

// The vectors of so many numbers, by name: gcc drops a vector_size that depends on a parameter.
template <int kWidth>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Floats = float __attribute__((vector_size(64)));
  using Words = uint32_t __attribute__((vector_size(64)));
  using Halves = uint16_t __attribute__((vector_size(32)));
};
template <>
struct VectorOf<8> {
  using Floats = float __attribute__((vector_size(32)));
  using Words = uint32_t __attribute__((vector_size(32)));
  using Halves = uint16_t __attribute__((vector_size(16)));
};
template <>
struct VectorOf<4> {
  using Floats = float __attribute__((vector_size(16)));
  using Words = uint32_t __attribute__((vector_size(16)));
  using Halves = uint16_t __attribute__((vector_size(8)));
};

template <int kWidth>
struct Lanes {
  using Vector = typename VectorOf<kWidth>::Floats;
  static constexpr int kParts = kFloats / kWidth;
  Vector part[kParts];
};
using Four = VectorOf<4>::Floats;

// Calls f for the index of each part, as a constant: a loop would be unrolled too late for the parts to be registers.
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
AK_SIMD_INLINE void load_floats(const bf16* at, Lanes<kWidth>& v) {
  using Halves = typename VectorOf<kWidth>::Halves;
  using Words = typename VectorOf<kWidth>::Words;
  each_part<Lanes<kWidth>::kParts>([&](auto p) __attribute__((always_inline)) {
    Halves bits;
    std::memcpy(&bits, at + p * kWidth, sizeof bits);
    const Words words = __builtin_convertvector(bits, Words) << 16;
    std::memcpy(&v.part[p], &words, sizeof words);
  });
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

// op of each part of a and b.
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
struct Larger {  // of a and NaN a
  template <typename V>
  AK_SIMD_INLINE V operator()(const V& a, const V& b) const {
    return b > a ? b : a;
  }
};
template <int kWidth>
AK_SIMD_INLINE Lanes<kWidth> operator+(const Lanes<kWidth>& a, const Lanes<kWidth>& b) {
  return of_parts(a, b, Add{});
}

// f(lane of each operand), by vectors: a formula in floats, compiled for the lanes of one vector at a time.
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

// The lanes joined by op until four are left: each with the one half the number further.
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
// The lanes of four rows joined, each row's as lanes_joined has them.
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

// body.operator()<Floats>(), compiled for the instructions that have such vectors. The body, a lambda that is
// always_inline and captures by value, is copied by each version, so that what it captured can be kept in registers.
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
