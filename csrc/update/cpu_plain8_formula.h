// The common part of the plain forms of a step with moments in 8 bits (update/cpu_plain8.h).
#pragma once

#include "base/block8.h"
#include "base/cpu/isa.h"
#include "base/cpu/tile.h"
#include "gradients/clip.h"
#include "update/cpu_moments.h"

#if AK_X86 && AK_HAS_SIMD_CLONES
#include <immintrin.h>

// GCC 12 warns of undefined vectors in its own intrinsics (bug 105593), and of vectors in arguments of functions that
// are always inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define AK_HAS_PLAIN8 1

namespace ak::plain8 {

inline constexpr int kLeastCode = 16;  // of a new moment

// Roots are finite: a block with another is not plain.
struct Numbers : AllNumbers {
  static AK_HD float divide(float x, float c, float reciprocal) { return divide_number(x, c, reciprocal); }
};

// The formula for the elements of a vector: a scalar one, which the compiler makes one of vectors.
template <class Rule, class Element, class Vector, int kThere, int kVectors>
AK_SIMD_INLINE void update_vector(const Element& element, const Vector& grad, Vector& weight,
                                  Vector (&moments)[kThere][kVectors], int at) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  struct Floats {
    float lane[kLanes];
  };
  Floats p, g, of[kThere];
  std::memcpy(&p, &weight, sizeof p);
  std::memcpy(&g, &grad, sizeof g);
  for (int m = 0; m < kThere; ++m) std::memcpy(&of[m], &moments[m][at], sizeof p);
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kLanes; ++lane) {
    float of_element[Rule::kMoments] = {};
    for (int m = 0; m < kThere; ++m) of_element[m] = of[m].lane[lane];
    element(p.lane[lane], of_element, g.lane[lane]);
    for (int m = 0; m < kThere; ++m) of[m].lane[lane] = of_element[m];
  }
  std::memcpy(&weight, &p, sizeof p);
  for (int m = 0; m < kThere; ++m) std::memcpy(&moments[m][at], &of[m], sizeof p);
}

constexpr int master_bytes(Master kind) {
  return kind == Master::kFloat32 ? 4 : kind == Master::kSplit ? 2 : kind == Master::kSplit24 ? 1 : 0;
}

// Prefetches as many bytes of a tensor as 64 elements have, each time the same distance ahead.
AK_SIMD_INLINE void prefetch_lines(const void* data, int64_t element_size, int64_t element) {
  const char* from = static_cast<const char*>(data) + element * element_size;
  for (int64_t line = 0; line < element_size; ++line) prefetch_ahead<true>(from + 64 * line);
}

}  // namespace ak::plain8
#else
#define AK_HAS_PLAIN8 0
#endif
