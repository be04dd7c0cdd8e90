// activation_backward: the gradient of the pre-activation z, grad * activation'(z), in fp32, rounded once.
//
// Work: reads grad and z, writes as much as z: 6 bytes an element in 16 bits and 20 to 60 instructions, so memory
// bandwidth is the limit. Plan: base/elementwise.cuh; with swiglu a thread takes a vector of gates and the matching
// vector of values. Trap: a view may begin anywhere and rows may be odd; then a thread takes one element at a time.
#include "activation/call.h"

#include "base/elementwise.cuh"
#include "base/half.h"
#include "device/dependent_launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

template <class Z, class G, int kVec>
AK_DEVICE void gradient_of(Activation activation, const G* grad, const Z* z, Z* out) {
  const auto g = load_vec<kVec, Cache::kStreaming>(grad);
  const auto x = load_vec<kVec, Cache::kStreaming>(z);
  Vec<Z, kVec> result;
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kVec; i++) result[i] = round_to<Z>(f(to_float(g[i]), to_float(x[i])));
  };
  switch (activation) {  // hoisted, so that each loop is branch-free
    case Activation::relu:
      each([](float dy, float v) { return activate_backward(Activation::relu, dy, v); });
      break;
    case Activation::gelu:
      each([](float dy, float v) { return activate_backward(Activation::gelu, dy, v); });
      break;
    case Activation::gelu_tanh:
      each([](float dy, float v) { return activate_backward(Activation::gelu_tanh, dy, v); });
      break;
    case Activation::silu:
      each([](float dy, float v) { return activate_backward(Activation::silu, dy, v); });
      break;
    case Activation::none:
    case Activation::swiglu:
      each([](float dy, float) { return dy; });
      break;
  }
  store_vec<Cache::kStreaming>(out, result);
}

template <class Z, class G, int kVec>
AK_KERNEL(kElementThreads, kElementBlocksPerSm)
activation_backward_kernel(const G* grad, const Z* z, Z* out, int64_t count, Activation activation) {
  wait_for_previous_kernel();
  allow_next_kernel();
  for_each_vector_of<kVec>(count,
                           [&]<int kN>(int64_t at) { gradient_of<Z, G, kN>(activation, grad + at, z + at, out + at); });
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
  const bool rows_aligned = !is_gated(p.activation) || p.columns / 2 % kVectorOf<Z, G> == 0;
  return vector_aligned(p.grad) && vector_aligned(p.z) && vector_aligned(p.out) && rows_aligned
             ? run_gradient<Z, G, kVectorOf<Z, G>>(p, stream)
             : run_gradient<Z, G, 1>(p, stream);
}

}  // namespace

Status activation_backward(const ActivationBackward& p, Stream stream) {
  if (p.rows * p.columns == 0) return {};
  const bool wide_grad = p.grad_type == DType::kFloat32;
  if (p.type == DType::kFloat32) return run_gradient<float, float>(p, stream);
  if (p.type == DType::kBFloat16) {
    return wide_grad ? run_gradient<bf16, float>(p, stream) : run_gradient<bf16, bf16>(p, stream);
  }
  return wide_grad ? run_gradient<fp16, float>(p, stream) : run_gradient<fp16, fp16>(p, stream);
}

}  // namespace ak
