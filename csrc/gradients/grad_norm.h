// The results of one pass over gradients: the sum of their squares, and their peak, which is the largest magnitude and
// whether one was infinite or NaN.
#pragma once

#include "base/config.h"

namespace ak {

// The kinds of norms: the sum of squares, whose square root the caller takes, or the largest magnitude, which keeps
// infinity and NaN.
enum class Norm : uint8_t { kSumOfSquares, kLargest };

// The bits of |x|. As integers they have the order of the magnitudes, infinity above all numbers and NaN above
// infinity, so that an integer maximum keeps both.
AK_HD uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }
AK_HD uint64_t magnitude_bits(double x) { return bits_of(x) & 0x7fffffffffffffffu; }

// The largest magnitude as fp32; the sign bit says that it is not finite. The unsigned maximum combines peaks. A finite
// double above fp32's range becomes infinity without the sign: that is no overflow.
inline constexpr uint32_t kNotFinite = 0x80000000u;
AK_HD uint32_t peak_of(uint32_t magnitude) { return magnitude >= 0x7f800000u ? magnitude | kNotFinite : magnitude; }
AK_HD uint32_t peak_of(uint64_t magnitude) {
  double x;
  memcpy(&x, &magnitude, sizeof x);
  const uint32_t rounded =
      magnitude_bits(static_cast<float>(x));  // rounding is monotonic: the largest stays the largest
  return magnitude >= 0x7ff0000000000000u ? rounded | kNotFinite : rounded;
}
AK_HD bool peak_is_finite(uint32_t peak) { return (peak & kNotFinite) == 0; }
AK_HD float peak_value(uint32_t peak) { return float_of(peak & ~kNotFinite); }

// Squares of fp32 values below 2^-75 are 0 in fp32, and below 2^-63 they lose bits: each loses up to 2^-150. If a sum
// of at most 2^6 of them is below kSmallSum, that exceeds its rounding error, so the sum is formed once more from
// values multiplied by kLift. Nothing overflows then (values below 2^-60 become values below 2^-28), and the remaining
// loss, 2^-214 a square, is negligible compared with the smallest fp32 result. Sums that overflow need no such care:
// squares are positive, so the result overflows as well.
inline constexpr float kSmallSum = 0x1p-120f;
inline constexpr float kLift = 0x1p32f;
inline constexpr double kUnlift = 0x1p-64;  // of the sum

}  // namespace ak
