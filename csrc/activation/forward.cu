// activation_forward: activation(z) in fp32, rounded once.
//
// Work: reads z, writes as much, or half as much with swiglu: 4 bytes an element in 16 bits, 3 if gated, and 20 to 40
// instructions, so memory bandwidth is the limit. Plan: base/elementwise.cuh; with swiglu a thread takes a vector of
// gates and the matching vector of values. Trap: a view may begin anywhere and rows may be odd; then a thread takes one
// element at a time.
#include "activation/call.h"

#include "base/elementwise.cuh"
#include "base/half.h"
#include "device/dependent_launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

template <class Z, int kVec>
AK_DEVICE void activation_of(Activation activation, const Z* z, Z* out) {
  const auto x = load_vec<kVec, Cache::kStreaming>(z);
  Vec<Z, kVec> result;
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kVec; i++) result[i] = round_to<Z>(f(to_float(x[i])));
  };
  switch (activation) {  // hoisted, so that each loop is branch-free
    case Activation::relu:
      each([](float v) { return activate(Activation::relu, v); });
      break;
    case Activation::gelu:
      each([](float v) { return activate(Activation::gelu, v); });
      break;
    case Activation::gelu_tanh:
      each([](float v) { return activate(Activation::gelu_tanh, v); });
      break;
    case Activation::silu:
      each([](float v) { return activate(Activation::silu, v); });
      break;
    case Activation::none:
    case Activation::swiglu:
      each([](float v) { return v; });
      break;
  }
  store_vec<Cache::kStreaming>(out, result);
}

template <class Z, int kVec>
AK_KERNEL(kElementThreads, kElementBlocksPerSm)
activation_forward_kernel(const Z* z, Z* out, int64_t count, Activation activation) {
  wait_for_previous_kernel();
  allow_next_kernel();
  for_each_vector_of<kVec>(count, [&]<int kN>(int64_t at) { activation_of<Z, kN>(activation, z + at, out + at); });
}

/// `columns` are those of out, a multiple of kVec.
template <class Z, int kVec>
AK_KERNEL(kElementThreads, kGatedBlocksPerSm)
swiglu_forward_kernel(const Z* z, Z* out, int64_t rows, int64_t columns) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t per_row = columns / kVec;
  const int64_t i = grid_thread();
  if (i >= rows * per_row) return;
  const int64_t row = i / per_row, at = row * columns + i * kVec;  // of the gate; out is at i
  const auto gate = load_vec<kVec, Cache::kStreaming>(z + at);
  const auto up = load_vec<kVec, Cache::kStreaming>(z + at + columns);
  Vec<Z, kVec> result;
  AK_UNROLL
  for (int j = 0; j < kVec; j++) result[j] = round_to<Z>(swiglu(to_float(gate[j]), to_float(up[j])));
  store_vec<Cache::kStreaming>(out + i * kVec, result);
}

template <class Z, int kVec>
Status run_activation(const ActivationForward& p, Stream stream) {
  const bool gated = is_gated(p.activation);
  const int64_t columns = gated ? p.columns / 2 : p.columns;
  const LaunchConfig config = elementwise_launch("activation_forward", p.rows * columns / kVec, stream);
  const Z* z = static_cast<const Z*>(p.z);
  Z* out = static_cast<Z*>(p.out);
  if (gated) return launch(swiglu_forward_kernel<Z, kVec>, config, z, out, p.rows, columns);
  return launch(activation_forward_kernel<Z, kVec>, config, z, out, p.rows * columns, p.activation);
}

template <class Z>
Status run_activation(const ActivationForward& p, Stream stream) {
  const bool rows_aligned = !is_gated(p.activation) || p.columns / 2 % kVectorOf<Z> == 0;
  return vector_aligned(p.z) && vector_aligned(p.out) && rows_aligned ? run_activation<Z, kVectorOf<Z>>(p, stream)
                                                                      : run_activation<Z, 1>(p, stream);
}

}  // namespace

Status activation_forward(const ActivationForward& p, Stream stream) {
  if (p.rows * p.columns == 0) return {};
  if (p.type == DType::kFloat32) return run_activation<float>(p, stream);
  return p.type == DType::kBFloat16 ? run_activation<bf16>(p, stream) : run_activation<fp16>(p, stream);
}

}  // namespace ak
