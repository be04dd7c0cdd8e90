// dz = grad * activation'(z) of activation_backward and gemm_dact on the CPU, in fp32, a piece of a row at a time.
#pragma once

#include <cstring>

#include "activation/formula.h"
#include "base/cpu/tile.h"

namespace ak {

template <Activation kActivation>
AK_SIMD_INLINE void backward_span(const float* grad, const float* z, float* dz, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) dz[i] = activate_backward(kActivation, grad[i], z[i]);
}

AK_SIMD_INLINE void backward_span(Activation activation, const float* grad, const float* z, float* dz, int64_t n) {
  switch (activation) {
    case Activation::relu:
      return backward_span<Activation::relu>(grad, z, dz, n);
    case Activation::gelu:
      return backward_span<Activation::gelu>(grad, z, dz, n);
    case Activation::gelu_tanh:
      return backward_span<Activation::gelu_tanh>(grad, z, dz, n);
    case Activation::silu:
      return backward_span<Activation::silu>(grad, z, dz, n);
    case Activation::none:
    case Activation::swiglu:
      std::memcpy(dz, grad, static_cast<size_t>(4 * n));
  }
}

AK_SIMD_INLINE void swiglu_backward_span(const float* grad, const float* gate, const float* up, float* d_gate,
                                         float* d_up, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const GatedGradient d = swiglu_backward(grad[i], gate[i], up[i]);
    d_gate[i] = d.gate;
    d_up[i] = d.up;
  }
}

struct ActivationGradient {
  Activation activation;
  int64_t columns, width;  // of grad; of preact and dz
  const void* preact;
  DType preact_dtype;
  void* dz;
  DType dz_dtype;

  // dz of `n` values of grad, in row r from column c on. Before it is rounded, seen(values, column, n) is called on it.
  template <typename Seen>
  AK_SIMD_INLINE void span(const float* grad, int64_t r, int64_t c, int64_t n, const Seen& seen) const {
    float gate_buffer[kTile], up_buffer[kTile], d_gate[kTile], d_up[kTile];
    const auto store = [&](const float* values, int64_t column) __attribute__((always_inline)) {
      const int64_t at = r * width + column;
      if (dz_dtype == DType::kFloat32) std::memcpy(static_cast<float*>(dz) + at, values, static_cast<size_t>(4 * n));
      store_span(values, dz, dz_dtype, at, n);
      seen(values, column, n);
    };
    const float* z = load_span(preact, preact_dtype, r * width + c, n, gate_buffer);
    if (is_gated(activation)) {
      const float* up = load_span(preact, preact_dtype, r * width + columns + c, n, up_buffer);
      swiglu_backward_span(grad, z, up, d_gate, d_up, n);
      store(d_up, columns + c);
    } else {
      backward_span(activation, grad, z, d_gate, n);
    }
    store(d_gate, c);
  }
};

}  // namespace ak
