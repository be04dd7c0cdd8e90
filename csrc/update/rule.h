// The interface of an optimizer's rule, a struct in csrc/update/rules/X.h. The CPU kernels, the CUDA kernels, the
// emulator and `_host` need nothing else of it:
//
//   struct X {
//     static constexpr const char* kName = "x_";          // the op's
//     static constexpr int kMoments = 2;                  // numbers kept of an element between steps, at least one
//     static constexpr int kRequiredMoments = 1;          // those of every parameter; it has all the others or none
//     static constexpr uint32_t kUnsigned = 0b10;         // bit k: moment k is never negative; may be left out
//     static constexpr int kOptions = 3;                  // numbers of a parameter group
//     struct Options { double lr, ..., weight_decay; };   // of a group: its numbers and flags
//     static Options options(const double* o, int64_t flags);  // o[0 .. kOptions), declared in amp_kernels/_updates
//     struct Scalars {...};                               // shared by the elements of one tensor in one step
//     static AK_HD Scalars scalars(const Options& o, float step);     // derived in double, rounded once
//     static AK_HD void update(float& p, float (&moments)[kMoments], bool optional, float g, const Scalars& s);
//   };
//
// `step` counts from 1: the value after the increment. `update` is one element in fp32, with or without the optional
// moments; `g` is the effective gradient: unscaled, clipped, negated when maximizing.
//
// A rule may have a plain form, for steps without its options whose new moments are normal: the kernel for moments in 8
// bits calls it for eight elements at a time, and the general one where moments turn out to be others.
//
//     static constexpr Magnitudes kNormal[kMoments] = {...};     // of the new moments; each may be 0, too
//     static AK_HD bool is_plain(const Scalars& s);
//     static AK_HD Scalars plain(Scalars s);                     // with constants for the options
//     template <class Numbers = AllNumbers> update(...);         // with roots and quotients by Numbers
//
// A rule that needs whole tensors before the first weight moves (a norm, a matrix product) has a stage:
//
//     static constexpr bool kHasStage = true;
//
// The stage runs before the pass that calls `update`. It gets every parameter with its shape (group_by_shape in
// update/update.h), may make a first pass over the elements, and writes its results into the scalars of each parameter.
// If the first pass moves the moments, `update` moves the weight alone, and its gradient is undefined. On a GPU the
// stage is Tuned<X>::stage (update/step.cuh), on the CPU run_stage<X> (update/cpu.h). The op also exists in two halves,
// for parameters that are pieces of tensors: between the halves the caller adds up the sums of the pieces.
#pragma once

#include <type_traits>

#include "base/block8.h"

namespace ak {

template <class Rule>
inline constexpr bool kHasStage = requires { Rule::kHasStage; };

// True if moment k is never negative: then its 8-bit codes have no sign (base/block8.h).
template <class Rule>
constexpr bool is_unsigned(int k) {
  if constexpr (requires { Rule::kUnsigned; }) return (Rule::kUnsigned >> k & 1) != 0;
  return false;
}

// The format of moment m in 8 bits.
template <class Rule, int m>
using CodeOf = std::conditional_t<is_unsigned<Rule>(m), UnsignedCode8, SignedCode8>;

// Bits of a group's flags. kStochastic: 16-bit parameters without a master are rounded stochastically (base/philox.h).
enum UpdateFlag : int64_t {
  kMaximize = 1,
  kNesterov = 2,
  kCoupledDecay = 4,
  kStochastic = 8,
  kNoBiasCorrection = 16,
  kAdaptAll = 32,
  kCautious = 64
};

// base^exponent by squaring: unlike pow() of the different math libraries it has the same bits everywhere.
AK_HD double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

// x / c, correctly rounded, for x >= 0 and a c whose rounded reciprocal is known: without a division, its checks and
// branches. The first quotient, with what the reciprocal is short of 1 / c, is off by little more than half a unit, so
// a correction rounds it correctly (Markstein, "Computation of elementary functions on the IBM RISC System/6000
// processor", 1990). Neither x / c nor what is left of x may underflow: roots of fp32 numbers are above 2^-75, and 1 >=
// c > 2^-40.
AK_HD float divide_number(float x, float c, float reciprocal) {
  const float rest = fma(-c, reciprocal, 1.0f) * reciprocal;
  const float quotient = fma(x, reciprocal, x * rest);
  return fma(fma(-c, quotient, x), reciprocal, quotient);
}

// The same for any x >= 0 or NaN.
AK_HD float divide(float x, float c, float reciprocal) {
  const float quotient = divide_number(x, c, reciprocal);
  return x < float_of(0x7f800000u) ? quotient : x;
}

// Roots and quotients in the formula of a rule that has a plain form; NormalNumbers (update/normal_numbers.cuh) in
// that.
struct AllNumbers {
  static AK_HD float sqrt(float x) { return ak::sqrt(x); }
  static AK_HD float div(float a, float b) { return ak::div(a, b); }
  static AK_HD float divide(float x, float c, float reciprocal) { return ak::divide(x, c, reciprocal); }
};

// Magnitudes from 2^least on, below 2^most.
struct Magnitudes {
  int least, most;
};

template <class Rule>
inline constexpr bool kHasPlain = requires { Rule::kNormal; };

// The direction of a cautious update: none where it has not the sign of the gradient (Liang et al., "Cautious
// optimizers: improving training with one line of code", 2024, without the rescaling). NaN stays.
AK_HD float cautious_direction(float direction, float g, bool cautious) {
  return cautious && direction * g <= 0.0f ? 0.0f : direction;
}

}  // namespace ak
