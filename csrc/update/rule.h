// What an optimizer is to the kernels: a rule, one struct in csrc/update/rules/X.h. The CPU kernels, the CUDA kernels,
// the emulator and `_host` know no more of it:
//
//   struct X {
//     static constexpr const char* kName = "x_";          // the op's
//     static constexpr int kMoments = 2;                  // numbers kept of an element between steps, at least one
//     static constexpr int kRequiredMoments = 1;          // what every parameter has; the others are all there or none
//     static constexpr int kOptions = 3;                  // numbers of a parameter group
//     struct Options { double lr, ..., weight_decay; };   // what a group sets: numbers and what its flags say
//     static Options options(const double* o, int64_t flags);         // o[0 .. kOptions), declared in amp_kernels/ops
//     struct Scalars {...};                               // what the elements of one tensor share in one step
//     static AK_HD Scalars scalars(const Options& o, float step);     // derived in double, rounded once
//     static AK_HD void update(float& p, float (&moments)[kMoments], bool optional, float g, const Scalars& s);
//   };
//
// `step` counts from 1: the value after the increment. `update` is one element in fp32, with or without the optional
// moments; `g` is the effective gradient: unscaled, clipped, negated when maximizing.
#pragma once

#include "base/config.h"

namespace ak {

// Bits of a group's flags. kStochastic: 16-bit parameters without a master are rounded stochastically (base/philox.h).
enum UpdateFlag : int64_t {
  kMaximize = 1,
  kNesterov = 2,
  kCoupledDecay = 4,
  kStochastic = 8,
  kNoBiasCorrection = 16,
  kAdaptAll = 32
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

}  // namespace ak
