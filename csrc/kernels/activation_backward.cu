// activation_backward: the gradient of the pre-activation z, grad times activation'(z), in fp32, rounded once.
//
// Work: reads grad and z, writes as much as z: 6 bytes an element in 16 bits, and some 20 to 60 instructions, so memory
// bandwidth is the limit. Plan: a thread takes 8 neighbouring elements, 16 or 32 bytes of each operand; the grid covers
// the elements a few times over. With swiglu a thread takes 8 gates and the 8 values that belong to them. Trap: a view
// may begin anywhere and rows may be odd; then a thread takes one element at a time.
#include "kernels/activation_backward.h"

#include <algorithm>

#include "device/launch.cuh"
#include "device/memory.cuh"
#include "math/half.h"

namespace ak {
namespace {

constexpr int kGradientThreads = 256;
constexpr int kGradientBlocksPerSm = 4;
constexpr int kWideGradient = 8;

template <class Z, class G, int kVec>
AK_DEVICE void gradient_of(Activation activation, const G* grad, const Z* z, Z* out) {
  const auto g = load_vec<kVec, Cache::kStreaming>(grad);
  const auto x = load_vec<kVec, Cache::kStreaming>(z);
  Vec<Z, kVec> result;
  const auto each = [&](auto f) {
    AK_UNROLL
    for (int i = 0; i < kVec; i++) result[i] = round_to<Z>(f(to_float(g[i]), to_float(x[i])));
  };
  switch (activation) {  // out here, so that each loop is of straight code
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
AK_KERNEL(kGradientThreads, kGradientBlocksPerSm)
activation_backward_kernel(const G* grad, const Z* z, Z* out, int64_t count, Activation activation) {
  const int64_t first = static_cast<int64_t>(block_index()) * kGradientThreads + thread_index();
  const int64_t vectors = count / kVec, stride = static_cast<int64_t>(grid_blocks()) * kGradientThreads;
  for (int64_t i = first; i < vectors; i += stride) {
    gradient_of<Z, G, kVec>(activation, grad + i * kVec, z + i * kVec, out + i * kVec);
  }
  const int64_t rest = vectors * kVec + first;
  if (rest < count) gradient_of<Z, G, 1>(activation, grad + rest, z + rest, out + rest);
}

/// `columns` are those of grad, a multiple of kVec.
template <class Z, class G, int kVec>
AK_KERNEL(kGradientThreads, kGradientBlocksPerSm)
swiglu_backward_kernel(const G* grad, const Z* z, Z* out, int64_t rows, int64_t columns) {
  const int64_t per_row = columns / kVec, vectors = rows * per_row;
  const int64_t stride = static_cast<int64_t>(grid_blocks()) * kGradientThreads;
  for (int64_t i = static_cast<int64_t>(block_index()) * kGradientThreads + thread_index(); i < vectors; i += stride) {
    const int64_t row = i / per_row, at = row * columns + i * kVec;  // of the gate; grad lies at i
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
}

template <class Z, class G, int kVec>
Status run_gradient(const ActivationGradient& p, Stream stream) {
  const bool gated = is_gated(p.activation);
  const int64_t columns = gated ? p.columns / 2 : p.columns;
  const int64_t vectors = std::max<int64_t>(1, p.rows * columns / kVec);
  const int64_t blocks = (vectors + kGradientThreads - 1) / kGradientThreads;
  const LaunchConfig config{
      .name = "activation_backward",
      .grid = static_cast<int>(std::min<int64_t>(blocks, device_sm_count() * kGradientBlocksPerSm)),
      .block = kGradientThreads,
      .stream = stream};
  const G* grad = static_cast<const G*>(p.grad);
  const Z* z = static_cast<const Z*>(p.z);
  Z* out = static_cast<Z*>(p.out);
  if (gated) return launch(swiglu_backward_kernel<Z, G, kVec>, config, grad, z, out, p.rows, columns);
  return launch(activation_backward_kernel<Z, G, kVec>, config, grad, z, out, p.rows * columns, p.activation);
}

template <class Z, class G>
Status run_gradient(const ActivationGradient& p, Stream stream) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const bool rows_aligned = !is_gated(p.activation) || p.columns / 2 % kWideGradient == 0;
  return aligned(p.grad) && aligned(p.z) && aligned(p.out) && rows_aligned
             ? run_gradient<Z, G, kWideGradient>(p, stream)
             : run_gradient<Z, G, 1>(p, stream);
}

}  // namespace

Status activation_backward(const ActivationGradient& p, Stream stream) {
  if (p.rows * p.columns == 0) return {};
  const bool wide_grad = p.grad_type == DType::kFloat32;
  if (p.type == DType::kFloat32) return run_gradient<float, float>(p, stream);
  if (p.type == DType::kBFloat16) {
    return wide_grad ? run_gradient<bf16, float>(p, stream) : run_gradient<bf16, bf16>(p, stream);
  }
  return wide_grad ? run_gradient<fp16, float>(p, stream) : run_gradient<fp16, fp16>(p, stream);
}

}  // namespace ak
