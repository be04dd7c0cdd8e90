// The plain form of a step with moments in 8 bits on a CPU with AVX2 or AVX-512: decode, update and encode in one pass
// over registers.
//
// A group of elements is plain if no unsigned code is a subnormal one and no moment is NaN, before and after. Its
// decoding is an addition, its roots are finite, and nothing of it has been stored when that is found out: the general
// form in update/cpu.h takes the other groups. New moments with codes of 16 and above are encoded by a multiplication;
// the words that it gives tell if one is below, and then the general form encodes the group. All forms give the same
// bits.
#pragma once

#include "update/cpu_plain8_avx2.h"
#include "update/cpu_plain8_avx512.h"

#if AK_HAS_PLAIN8
namespace ak::plain8 {

// The first of elements [at, at + n) of a parameter, a tile at most, as many as are whole groups; returns their number.
// Calls general(first, number) for groups that are not plain, with places in the tile.
template <class Rule, bool kOptional, class General>
int64_t update(const Param& p, int64_t at, int64_t n, float* weights, const float* grads, TileNumbers& numbers,
               const typename Rule::Scalars scalars, float inv_scale, float clip, const General& general) {
  const bool wide = vector_bits() == 512;
  n -= n % (wide ? avx512::kGroup : kBlock8);
  if (n == 0) return 0;
  const auto run = [&](const auto& scalars_of) {
    const auto element = [=](float& weight, float (&moments)[Rule::kMoments], float grad) AK_ALWAYS_INLINE {
      const float g = effective_grad(grad, inv_scale, clip);
      if constexpr (kHasPlain<Rule>) {
        Rule::template update<Numbers>(weight, moments, kOptional, g, scalars_of(scalars));
      } else {
        Rule::update(weight, moments, kOptional, g, scalars);
      }
    };
    if (wide) {
      avx512::update<Rule, kOptional>(p, at, n, weights, grads, numbers, element, general);
    } else {
      avx2::update<Rule, kOptional>(p, at, n, weights, grads, numbers, element, general);
    }
    return n;
  };
  if constexpr (kHasPlain<Rule>) {
    if (Rule::is_plain(scalars)) return run([](const auto& s) AK_ALWAYS_INLINE { return Rule::plain(s); });
  }
  return run([](const auto& s) AK_ALWAYS_INLINE { return s; });
}

}  // namespace ak::plain8
#endif
