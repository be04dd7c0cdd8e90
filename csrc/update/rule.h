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

#include "base/config.h"

namespace ak {

template <class Rule>
inline constexpr bool kHasStage = requires { Rule::kHasStage; };

// True if moment k is never negative: then its 8-bit codes have no sign (base/block8.h).
template <class Rule>
constexpr bool is_unsigned(int k) {
  if constexpr (requires { Rule::kUnsigned; }) return (Rule::kUnsigned >> k & 1) != 0;
  return false;
}

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

// The direction of a cautious update: none where it has not the sign of the gradient (Liang et al., "Cautious
// optimizers: improving training with one line of code", 2024, without the rescaling). NaN stays.
AK_HD float cautious_direction(float direction, float g, bool cautious) {
  return cautious && direction * g <= 0.0f ? 0.0f : direction;
}

}  // namespace ak
