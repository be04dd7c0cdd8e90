// The activations of a GEMM epilogue and their derivatives, in fp32: relu, gelu (by erf), gelu_tanh, silu, and the
// gated swiglu (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202), which takes a gate and a value:
// silu(gate) * up.
//
// A GEMM executes every instruction here for every element of C, so there are some twenty: fmas, and a power of two
// built from its bits. No division, branch or hardware approximation, so the bits agree between host, emulator and GPU.
// With t = |x| a smooth activation is
//   f(x) = relu(x) - t q(t),      f'(x) = 1/2 + sign(x) (1/2 - g(t)),  g = q + t q'
// where q falls from 1/2 to 0: the upper tail of the normal distribution for gelu, a sigmoid for the others. The tails
// of gelu are 2^p(t), and g is (1 - t / t0) 2^p(t) with its zero t0, the polynomials p being minimax fits with
// p(0) = -1. f(-inf) = -0, f(inf) = inf, f'(-inf) = 0, f'(inf) = 1: the limits, where torch has NaN, save f(inf).
// NaN stays NaN. Bounds, with u = 2^-24, as tests/math/test_activation.py checks:
//   f   4 u |x|; in the tail also 2^-11, 2^-10 or (6 + |x| / 2) u of the result for gelu, gelu_tanh and silu, give or
//       take 2^-36, 2^-33 and 2^-118, since f is 0 below -7, -6 and -87
//   f'  4 u
#pragma once

#include "base/config.h"

namespace ak {

enum class Activation : int { none, relu, gelu, gelu_tanh, silu, swiglu };

inline constexpr int kActivations = 6;

// A gated activation maps 2 F columns to F: the first half are the gates, the second half the values.
AK_HD bool is_gated(Activation activation) { return activation == Activation::swiglu; }

namespace detail {

// c0 + c1 x + c2 x^2 + ...
template <class... C>
AK_HD float polynomial(float x, float c0, C... c) {
  if constexpr (sizeof...(c) == 0)
    return c0;
  else
    return fma(polynomial(x, c...), x, c0);
}

// 2^(t v + kExponent), with v <= 0 and a result of at least 2^-126. The minimax fit of 2^r over |r| <= 1/2 is off by
// 1.6 u.
template <int kExponent>
AK_HD float exp2_of_product(float t, float v) {
  constexpr float kToInteger = 0x1.8p23f;  // added: rounds to an integer, in the low mantissa bits
  const float shifted = fma(t, v, kToInteger + kExponent);
  const float r = fma(t, v, (kToInteger + kExponent) - shifted);
  const float m = polynomial(r, 1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f);
  return float_of(bits_of(m) + (bits_of(shifted) << 23));  // kToInteger itself is shifted out
}

// The value of 2^-1 2^(t v(t)) at the last t is subtracted everywhere, so that the tail ends with 0.

AK_HD float gelu_tail(float t) {
  const float v = polynomial(t, -0x1.26af8p+0f, -0x1.d61e76p-2f, -0x1.b10068p-5f, 0x1.f24b92p-8f, -0x1.1e575cp-11f,
                             -0x1.98e8e4p-16f, 0x1.02ebb2p-17f, -0x1.bcd0eap-22f);
  return exp2_of_product<-1>(t, v) - 0x1.681434p-40f;
}

// 1 / (1 + exp(z)), z = 2 sqrt(2 / pi) (t + 0.044715 t^3): (1 + tanh y) / 2 is the sigmoid of 2 y.
AK_HD float gelu_tanh_tail(float t) {
  const float v = polynomial(t, -0x1.26adc4p+0f, -0x1.d67656p-2f, -0x1.9dd186p-5f, 0x1.75c028p-8f, 0x1.040216p-9f,
                             -0x1.6e40dap-10f, 0x1.b6ab44p-15f, 0x1.0a8110p-14f, -0x1.86d966p-17f, 0x1.4ec706p-21f);
  return exp2_of_product<-1>(t, v) - 0x1.ef5cfcp-37f;
}

// 1 / (1 + exp(t)), and its complement to 1.
struct SigmoidTail {
  float q, complement;
};

AK_HD SigmoidTail sigmoid_tail(float t) {
  const float e = exp2_of_product<0>(t, -0x1.715476p+0f);
  // 1 / (1 + e) for 0 <= e <= 1: a minimax fit off by 1 / 577, then a step that takes the error to its third power.
  const float guess = polynomial(e, 0x1.ff1cd6p-1f, -0x1.e2b7aep-1f, 0x1.54bde4p-1f, -0x1.c65286p-3f);
  const float error = fma(-e, guess, 1.0f - guess);
  const float inverse = fma(guess, fma(error, error, error), guess);
  return {fma(e, inverse, -0x1.666d28p-126f), inverse};
}

// The ends of the tails.
inline constexpr float kGeluLimit = 7.0f;
inline constexpr float kGeluTanhLimit = 6.0f;
inline constexpr float kSiluLimit = 87.0f;

AK_HD float size_of(float x, float limit) { return min_or_nan(abs(x), limit); }

// relu(x) - t q; -0 keeps the sign of a zero.
AK_HD float without_tail(float x, float t, float q) { return fma(-t, q, max_or_nan(x, -0.0f)); }

// 1/2 + sign(x) (1/2 - m h), where m h is at most 1/2.
AK_HD float slope_of(float x, float m, float h) {
  const float from_half = fma(-m, h, 0.5f);
  return 0.5f + float_of(bits_of(from_half) | (bits_of(x) & 0x80000000u));
}

}  // namespace detail

AK_HD float relu(float x) { return x < 0.0f ? 0.0f : x; }

AK_HD float gelu(float x) {
  const float t = detail::size_of(x, detail::kGeluLimit);
  return detail::without_tail(x, t, detail::gelu_tail(t));
}

AK_HD float gelu_tanh(float x) {
  const float t = detail::size_of(x, detail::kGeluTanhLimit);
  return detail::without_tail(x, t, detail::gelu_tanh_tail(t));
}

AK_HD float silu(float x) {
  const float t = detail::size_of(x, detail::kSiluLimit);
  return detail::without_tail(x, t, detail::sigmoid_tail(t).q);
}

AK_HD float gelu_derivative(float x) {
  const float t = detail::size_of(x, detail::kGeluLimit);
  const float v = detail::polynomial(t, -0x1.8862b2p-2f, -0x1.1f13b4p-1f, -0x1.c09228p-5f, 0x1.e105b6p-7f,
                                     -0x1.762790p-9f, 0x1.6cc278p-12f, -0x1.459656p-16f);
  return detail::slope_of(x, fma(-0x1.54851ap+0f, t, 1.0f), detail::exp2_of_product<-1>(t, v));
}

AK_HD float gelu_tanh_derivative(float x) {
  const float t = detail::size_of(x, detail::kGeluTanhLimit);
  const float v =
      detail::polynomial(t, -0x1.8a24b8p-2f, -0x1.202f56p-1f, -0x1.beb566p-5f, 0x1.2d00aep-6f, -0x1.68c126p-8f,
                         0x1.ee0994p-9f, -0x1.2fee26p-9f, 0x1.589980p-11f, -0x1.6ff6e4p-14f, 0x1.32a90ep-18f);
  return detail::slope_of(x, fma(-0x1.54377ep+0f, t, 1.0f), detail::exp2_of_product<-1>(t, v));
}

// q' = -q (1 - q)
AK_HD float silu_derivative(float x) {
  const float t = detail::size_of(x, detail::kSiluLimit);
  const detail::SigmoidTail s = detail::sigmoid_tail(t);
  return detail::slope_of(x, fma(-t, s.complement, 1.0f), s.q);
}

AK_HD float swiglu(float gate, float up) { return silu(gate) * up; }

struct GatedGradient {
  float gate, up;
};

// The gradients of `gate` and `up`, given the gradient of swiglu(gate, up).
AK_HD GatedGradient swiglu_backward(float grad, float gate, float up) {
  return {grad * up * silu_derivative(gate), grad * silu(gate)};
}

// For ungated activations.
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

// The gradient of `x`, given the gradient of activate(x), for ungated activations. relu selects instead of multiplying,
// so that an infinite gradient does not become NaN where the activation is off.
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
