// scaled_exp of loss/exponential.h, and the exponentials that the loss makes of it, against double precision, over a
// million floats from -128 to 0 and all around the integers that x / ln 2 is rounded to; then what is no number, and
// what is out of range.
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "loss/exponential.h"

using namespace ak;

static double worst = 0.0;
static long wrong = 0;

static float exp_of_logit(float x) { return scaled_exp(logit_in_range(x)) * kExpUnscale; }

static void check(float x) {
  const double exact = std::exp(static_cast<double>(x));
  const double error = std::fabs(scaled_exp(x) - 0x1p64 * exact) / (0x1p64 * exact) * 0x1p24;
  worst = std::fmax(worst, error);
  const float whole = exp_of_logit(x), once = static_cast<float>(scaled_exp(x) * 0x1p-64);
  wrong += error > 1.3 || bits_of(whole) != bits_of(once);
}

int main() {
  for (uint32_t bits = bits_of(-0.0f); bits <= bits_of(-128.0f); bits += 1021) check(float_of(bits));
  for (int n = 0; n < 370; ++n)  // where r changes its sign, and where it jumps
    for (int step = -200; step <= 200; ++step) {
      const float middle = static_cast<float>(-0.5 * n * 0.6931471805599453);
      const float x = float_of(bits_of(middle) + static_cast<uint32_t>(step));
      if (x <= 0.0f && x >= -128.0f) check(x);
    }
  check(0.0f), check(-128.0f);
  wrong += exp_of_logit(0.0f) != 1.0f;
  for (const float none : {-104.0f, -129.0f, -3e38f, -HUGE_VALF}) wrong += bits_of(exp_of_logit(none)) != 0;
  wrong += exp_of_logit(-103.9f) == 0.0f;  // half of the least subnormal number is the bound
  for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu})
    wrong += !std::isnan(exp_of_logit(float_of(nan)));
  std::printf("%ld wrong; at most %.3f u\n", wrong, worst);
  return wrong != 0;
}
