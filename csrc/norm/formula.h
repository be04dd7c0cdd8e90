// Layer norm and RMS norm of a row, and their gradients. RMS norm is layer norm with a mean of 0.
//
// With the row's statistics, n = (x - mean) * rstd and y = n * weight + bias. Statistics take two passes over the row:
// first the mean, then the mean square around it, for E[x^2] - E[x]^2 cancels where the mean is large.
#pragma once

#include <type_traits>

#include "base/config.h"

namespace ak {

// Squares of numbers from 2^64 on overflow fp32. If the mean square of a row is not finite, the row is measured once
// more, multiplied by kShrink: then no sum of up to 2^31 squares overflows, and eps is negligible.
inline constexpr float kShrink = 0x1p-80f;
inline constexpr float kUnshrink = 0x1p80f;

// Statistics of a row from those of the row times `factor`, which is 1 or kShrink.
AK_HD float unshrunk_mean(float mean, float factor) { return factor == 1.0f ? mean : mean * kUnshrink; }
AK_HD float reciprocal_deviation(float mean_square, float eps, float factor) {
  return div(factor, sqrt(factor == 1.0f ? mean_square + eps : mean_square));
}

// A part of a row: its size, its mean, and the sum of the squared distances from the mean.
template <typename T>
struct RowMoments {
  T count = 0, mean = 0, squares = 0;
};

AK_HD double fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

// The moments of two parts together: T. Chan, G. Golub, R. LeVeque: Updating formulae and a pairwise algorithm for
// computing sample variances, 1979. If both means are 0, as for RMS norm, the squares are added. The square of `apart`
// may overflow if the first part is empty, so it is never formed.
template <typename T>
AK_HD RowMoments<T> joined(const RowMoments<T>& a, const RowMoments<T>& b) {
  const T count = a.count + b.count, share = div(b.count, count), apart = b.mean - a.mean;
  return {count, fma(apart, share, a.mean), fma(apart * share * a.count, apart, a.squares + b.squares)};
}

// A sum over the pieces of a row, each summed in fp32, if there are several: double, so that the error does not grow
// with the row.
template <bool kWhole>
using SumOfPieces = std::conditional_t<kWhole, float, double>;

AK_HD float normalized(float x, float mean, float rstd) { return (x - mean) * rstd; }
AK_HD float scaled_and_shifted(float n, float weight, float bias) { return fma(n, weight, bias); }

// The gradient of x, with g that of n, and the means of g and of g * n over the row.
AK_HD float norm_gradient(float g, float n, float rstd, float mean_g, float mean_gn) {
  return fma(-n, mean_gn, g - mean_g) * rstd;
}

}  // namespace ak
