// The activations of a GEMM epilogue and their derivatives, in fp32: relu, gelu (by erf), gelu_tanh, silu, and the
// gated swiglu (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202), which takes a gate and a value:
// silu(gate) * up.
//
// None calls libm or the CUDA math library, so the bits agree between host, emulator and GPU, and all are branch-free.
// The negative tails are computed from the small quantity itself (Q = 1 - Phi, or a sigmoid through exp(-|x|)), not as
// 1 - something near 1. Limits are right: f(-inf) = 0, f(inf) = inf, and NaN stays NaN. Bounds, with u = 2^-24, as
// tests/math/test_activation.py checks:
//   silu                  relative error <= 4 u
//   gelu                  relative error <= 8 u
//   gelu_tanh             relative error <= (6 + 3 |z|) u, z = the argument of its sigmoid: exp magnifies the rounding
//   of z results below 2^-118  absolute error <= 2^-133 derivatives           absolute error <= 5 u
#pragma once

#include <optional>
#include <string_view>

#include "math/config.h"

namespace ak {

enum class Activation : int { none, relu, gelu, gelu_tanh, silu, swiglu };

inline constexpr const char* kActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu", "swiglu"};
inline constexpr int kActivations = 6;

// A gated activation makes F columns of a pre-activation of 2 F: the gates stand in the first half, the values in the
// second.
AK_HD bool is_gated(Activation activation) { return activation == Activation::swiglu; }

// Host only: callers say in their own words what is accepted.
inline std::optional<Activation> find_activation(std::string_view name) {
  for (int i = 0; i < kActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  return std::nullopt;
}

namespace detail {

AK_HD float clamp(float x, float low, float high) {
  const float raised = x < low ? low : x;  // comparisons that NaN fails, so that it passes through
  return raised > high ? high : raised;
}

// exp(x) for -170 <= x <= 0, to 1.4 u. 2^n e^r with |r| <= ln 2 / 2; polynomial and split of ln 2 from Cephes
// (Moshier), expf. Every caller clamps its argument; results that round to zero come out as zero.
AK_HD float exp_nonpositive(float x) {
  const float shifted = fma(x, 0x1.715476p+0f, 0x1.8p23f);  // x / ln 2, rounded to an integer in the low mantissa bits
  const float n = shifted - 0x1.8p23f;
  float r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  float q = 1.9875691500e-4f;
  q = fma(q, r, 1.3981999507e-3f);
  q = fma(q, r, 8.3334519073e-3f);
  q = fma(q, r, 4.1665795894e-2f);
  q = fma(q, r, 1.6666665459e-1f);
  q = fma(q, r, 5.0000001201e-1f);
  const float mantissa = fma(q, r * r, r) + 1.0f;
  // In two factors, because 2^n itself may be too small for a normal number.
  const int32_t exponent = static_cast<int32_t>(bits_of(shifted) - 0x4b400000u);
  const int32_t half = exponent >> 1;
  const float first = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float second = float_of(static_cast<uint32_t>(exponent - half + 127) << 23);
  return mantissa * first * second;
}

// Of the standard normal distribution, for t >= 0: the upper tail Q(t) = erfc(t / sqrt 2) / 2 and e = exp(-t^2 / 2).
struct NormalTail {
  float q, e;
};

AK_HD NormalTail normal_tail(float t) {
  const float square = t * t;
  const float square_error = fma(t, t, -square);  // for t = 10 the rounding of t^2 alone would cost 25 u
  float e = exp_nonpositive(-0.5f * square);
  e = fma(e, -0.5f * square_error, e);
  // Q(t) / e as k P(k), k = 1 / (1 + 0.3 t): minimax fit of degree 9 over 0 <= t <= 14.5, relative error 2^-28.
  const float k = div(1.0f, fma(0.3f, t, 1.0f));
  float p = -0x1.51e504p-6f;
  p = fma(p, k, 0x1.cc892ap-4f);
  p = fma(p, k, -0x1.d3617ep-3f);
  p = fma(p, k, 0x1.88c61ap-3f);
  p = fma(p, k, -0x1.455136p-4f);
  p = fma(p, k, 0x1.89db8ep-4f);
  p = fma(p, k, 0x1.411592p-4f);
  p = fma(p, k, 0x1.c38636p-4f);
  p = fma(p, k, 0x1.e9c424p-4f);
  p = fma(p, k, 0x1.ea3c98p-4f);
  return {k * p * e, e};
}

// 1 / (1 + exp(-z)) and its complement, both without cancellation.
struct Sigmoid {
  float s, complement;
};

AK_HD Sigmoid sigmoid(float z) {
  const float e = exp_nonpositive(-abs(z));
  const float large = div(1.0f, 1.0f + e);
  const float small = div(e, 1.0f + e);
  return {z < 0.0f ? small : large, z < 0.0f ? large : small};
}

// The sigmoid form of tanh-gelu: (1 + tanh y) / 2 = sigmoid(2 y), 2 y = 2 sqrt(2 / pi) (x + 0.044715 x^3) = x (kLinear
// + kCubic x^2).
inline constexpr float kLinear = 1.5957691216057308f;
inline constexpr float kCubic = 0.07135481627260025f;

// Beyond these the tails are zero in fp32; the clamps keep inf * 0 away.
inline constexpr float kGeluLimit = 14.5f;
inline constexpr float kGeluTanhLimit = 11.5f;
inline constexpr float kSiluLimit = 128.0f;

}  // namespace detail

AK_HD float relu(float x) { return x < 0.0f ? 0.0f : x; }

AK_HD float gelu(float x) {
  const float t = detail::clamp(abs(x), 0.0f, detail::kGeluLimit);
  return fma(-t, detail::normal_tail(t).q, relu(x));
}

AK_HD float gelu_tanh(float x) {
  const float c = detail::clamp(x, -detail::kGeluTanhLimit, detail::kGeluTanhLimit);
  const float s = detail::sigmoid(c * fma(detail::kCubic, c * c, detail::kLinear)).s;
  return (x < 0.0f ? c : x) * s;
}

AK_HD float silu(float x) {
  const float c = detail::clamp(x, -detail::kSiluLimit, detail::kSiluLimit);
  return (x < 0.0f ? c : x) * detail::sigmoid(c).s;
}

AK_HD float gelu_derivative(float x) {
  const float t = detail::clamp(abs(x), 0.0f, detail::kGeluLimit);
  const detail::NormalTail tail = detail::normal_tail(t);
  const float cdf = x < 0.0f ? tail.q : 1.0f - tail.q;
  return fma((x < 0.0f ? -t : t) * 0.3989422804014327f, tail.e, cdf);
}

AK_HD float gelu_tanh_derivative(float x) {
  const float c = detail::clamp(x, -detail::kGeluTanhLimit, detail::kGeluTanhLimit);
  const detail::Sigmoid s = detail::sigmoid(c * fma(detail::kCubic, c * c, detail::kLinear));
  const float slope = fma(3.0f * detail::kCubic, c * c, detail::kLinear);
  return fma(c * slope, s.s * s.complement, s.s);
}

AK_HD float silu_derivative(float x) {
  const float c = detail::clamp(x, -detail::kSiluLimit, detail::kSiluLimit);
  const detail::Sigmoid s = detail::sigmoid(c);
  return fma(c * s.s, s.complement, s.s);
}

AK_HD float swiglu(float gate, float up) { return silu(gate) * up; }

struct GatedGradient {
  float gate, up;
};

// The gradients of `gate` and `up`, given the gradient of swiglu(gate, up).
AK_HD GatedGradient swiglu_backward(float grad, float gate, float up) {
  return {grad * up * silu_derivative(gate), grad * silu(gate)};
}

// For activations of one argument; a gated one has functions of its own above.
AK_HD float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::relu:
      return relu(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::silu:
      return silu(x);
    case Activation::none:
    case Activation::swiglu:
      break;
  }
  return x;
}

// The gradient of `x`, given the gradient of activate(x); not for gated activations. relu chooses instead of
// multiplying, so that an infinite gradient does not turn into NaN where the activation is off.
AK_HD float activate_backward(Activation activation, float grad, float x) {
  switch (activation) {
    case Activation::relu:
      return x <= 0.0f ? 0.0f : grad;
    case Activation::gelu:
      return grad * gelu_derivative(x);
    case Activation::gelu_tanh:
      return grad * gelu_tanh_derivative(x);
    case Activation::silu:
      return grad * silu_derivative(x);
    case Activation::none:
    case Activation::swiglu:
      break;
  }
  return grad;
}

}  // namespace ak
