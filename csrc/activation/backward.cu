// activation_backward: the gradient of the pre-activation z, grad * activation'(z), in fp32, rounded once; if asked
// for, the sums of its columns, the gradient of a bias.
//
// Work: reads grad and z, writes as much as z: 6 bytes an element in 16 bits and 10 to 35 instructions, of which an SM
// of the H200 issues 37 while they move, so memory bandwidth is the limit. Plan: base/elementwise.cuh; with swiglu a
// thread takes a vector of gates and the matching vector of values. With sums, of 16 bits: the grid of
// column_sums/strip.cuh, whose threads have two rows, 64 bytes, in flight, 64 KB an SM; a kernel of its own would read
// the result again, a quarter of all bytes. Sums of swiglu, of fp32 and of what is unaligned do so: no model has them.
// Traps: a view may begin anywhere and rows may be odd; then a thread takes one element at a time. The sums have the
// order of additions of column_sums, so that the two ways give the same bits.
#include "activation/call.h"

#include "base/elementwise.cuh"
#include "base/half.h"
#include "column_sums/strip.cuh"
#include "device/dependent_launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

/// Calls f with the function (grad, z) -> gradient of z of an ungated activation.
template <class F>
AK_DEVICE void with_derivative(Activation activation, F f) {
  switch (activation) {
    case Activation::relu:
      return f([](float dy, float v) { return activate_backward(Activation::relu, dy, v); });
    case Activation::gelu:
      return f([](float dy, float v) { return activate_backward(Activation::gelu, dy, v); });
    case Activation::gelu_tanh:
      return f([](float dy, float v) { return activate_backward(Activation::gelu_tanh, dy, v); });
    case Activation::silu:
      return f([](float dy, float v) { return activate_backward(Activation::silu, dy, v); });
    case Activation::none:
    case Activation::swiglu:
      return f([](float dy, float) { return dy; });
  }
}

template <class Z, class G, int kVec>
AK_DEVICE Vec<Z, kVec> gradient_of(Activation activation, const Vec<G, kVec>& grad, const Vec<Z, kVec>& z) {
  const auto dy = to_floats(grad), v = to_floats(z);
  Vec<Z, kVec> result;
  with_derivative(activation, [&](auto derivative) {  // outside of the loop, which has no branch
    AK_UNROLL
    for (int i = 0; i < kVec; i++) result[i] = round_to<Z>(derivative(dy[i], v[i]));
  });
  return result;
}

template <class Z, class G, int kVec>
AK_KERNEL(kElementThreads, kElementBlocksPerSm)
activation_backward_kernel(const G* grad, const Z* z, Z* out, int64_t count, Activation activation) {
  wait_for_previous_kernel();
  allow_next_kernel();
  for_each_vector_of<kVec>(count, [&]<int kN>(int64_t at) {
    const auto g = load_vec<kN, Cache::kStreaming>(grad + at);
    const auto x = load_vec<kN, Cache::kStreaming>(z + at);
    store_vec<Cache::kStreaming>(out + at, gradient_of(activation, g, x));
  });
}

/// grad and z of 16 bits.
template <class T>
AK_KERNEL(ColumnStrips::kThreads, 4)
activation_backward_sums_kernel(AK_PARAM(ActivationBackward) p, AK_PARAM(ColumnStrips) strips) {
  constexpr int kVec = kVectorOf<T>, kRows = 2;
  struct Operands {
    Vec<T, kVec> grad, z;
  };
  wait_for_previous_kernel();
  allow_next_kernel();
  const T* grad = static_cast<const T*>(p.grad);
  const T* z = static_cast<const T*>(p.z);
  T* out = static_cast<T*>(p.out);
  const auto load = [&](int64_t at) -> Operands {
    return {load_vec<kVec, Cache::kStreaming>(grad + at), load_vec<kVec, Cache::kStreaming>(z + at)};
  };
  sum_strip<Operands, kVec, kRows>(sums_of(p), strips, load, [&](const Operands& v, int64_t at, bool inside) {
    const auto dz = gradient_of(p.activation, v.grad, v.z);
    if (inside) store_vec<Cache::kStreaming>(out + at, dz);
    return dz;
  });
}

/// `columns` are those of grad, a multiple of kVec.
template <class Z, class G, int kVec>
AK_KERNEL(kElementThreads, kGatedBlocksPerSm)
swiglu_backward_kernel(const G* grad, const Z* z, Z* out, int64_t rows, int64_t columns) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t per_row = columns / kVec;
  const int64_t i = grid_thread();
  if (i >= rows * per_row) return;
  const int64_t row = i / per_row, at = row * columns + i * kVec;  // of the gate; grad is at i
  const auto g = load_vec<kVec, Cache::kStreaming>(grad + i * kVec);
  const auto gate = load_vec<kVec, Cache::kStreaming>(z + at);
  const auto up = load_vec<kVec, Cache::kStreaming>(z + at + columns);
  Vec<Z, kVec> gate_out, up_out;
  AK_UNROLL
  for (int j = 0; j < kVec; j++) {
    const GatedGradient d = swiglu_backward(to_float(g[j]), to_float(gate[j]), to_float(up[j]));
    gate_out[j] = round_to<Z>(d.gate);
    up_out[j] = round_to<Z>(d.up);
  }
  store_vec<Cache::kStreaming>(out + at, gate_out);
  store_vec<Cache::kStreaming>(out + at + columns, up_out);
}

template <class Z, class G, int kVec>
Status run_gradient(const ActivationBackward& p, Stream stream) {
  const bool gated = is_gated(p.activation);
  const int64_t columns = gated ? p.columns / 2 : p.columns;
  const LaunchConfig config = elementwise_launch("activation_backward", p.rows * columns / kVec, stream);
  const G* grad = static_cast<const G*>(p.grad);
  const Z* z = static_cast<const Z*>(p.z);
  Z* out = static_cast<Z*>(p.out);
  if (gated) return launch(swiglu_backward_kernel<Z, G, kVec>, config, grad, z, out, p.rows, columns);
  return launch(activation_backward_kernel<Z, G, kVec>, config, grad, z, out, p.rows * columns, p.activation);
}

template <class Z, class G>
Status run_gradient(const ActivationBackward& p, Stream stream) {
  constexpr int kVec = kVectorOf<Z, G>;
  const bool gated = is_gated(p.activation);
  const bool aligned = vector_aligned(p.grad) && vector_aligned(p.z) && vector_aligned(p.out);
  if constexpr (sizeof(Z) == 2 && sizeof(G) == 2) {
    if (p.sums != nullptr && aligned && !gated && p.columns % kVec == 0)
      return launch_strips("activation_backward", activation_backward_sums_kernel<Z>, p, sums_of(p), stream);
  }
  const Status status = aligned && (!gated || p.columns / 2 % kVec == 0) ? run_gradient<Z, G, kVec>(p, stream)
                                                                         : run_gradient<Z, G, 1>(p, stream);
  return status.ok() && p.sums != nullptr ? column_sums(sums_of(p), stream) : status;
}

}  // namespace

Status activation_backward(const ActivationBackward& p, Stream stream) {
  if (p.rows * p.columns == 0) return p.sums != nullptr && p.columns > 0 ? column_sums(sums_of(p), stream) : Status{};
  const bool wide_grad = p.grad_type == DType::kFloat32;
  if (p.type == DType::kFloat32) return run_gradient<float, float>(p, stream);
  if (p.type == DType::kBFloat16) {
    return wide_grad ? run_gradient<bf16, float>(p, stream) : run_gradient<bf16, bf16>(p, stream);
  }
  return wide_grad ? run_gradient<fp16, float>(p, stream) : run_gradient<fp16, fp16>(p, stream);
}

}  // namespace ak
