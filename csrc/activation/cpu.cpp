// activation_forward and activation_backward on the CPU, elementwise in fp32, rounded once. Work: forward reads z and
// writes as much, or half as much with swiglu; backward reads grad and z and writes as much as z.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "activation/call.h"
#include "activation/cpu_gradient.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/tile.h"

namespace ak {
namespace {

constexpr int64_t kElementsPerThread = 32768;

int64_t rows_per_thread(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, columns));
}

template <typename Z, Activation kActivation>
AK_SIMD_CLONES void forward_span(const Z* z, Z* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<Z>(activate(kActivation, to_float(z[i])));
}

// z: `columns` gates, then as many values.
template <typename Z>
AK_SIMD_CLONES void swiglu_row(const Z* z, Z* out, int64_t columns) {
#pragma GCC ivdep
  for (int64_t i = 0; i < columns; ++i) out[i] = round_to<Z>(swiglu(to_float(z[i]), to_float(z[columns + i])));
}

template <typename Z, Activation kActivation>
void forward(const ActivationForward& call) {
  const Z* const z = static_cast<const Z*>(call.z);
  Z* const out = static_cast<Z*>(call.out);
  if constexpr (kActivation == Activation::swiglu) {
    const int64_t columns = call.columns / 2;
    torch::stable::parallel_for(0, call.rows, rows_per_thread(columns), [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) swiglu_row(z + 2 * r * columns, out + r * columns, columns);
    });
  } else {
    torch::stable::parallel_for(0, call.rows * call.columns, kElementsPerThread, [=](int64_t begin, int64_t end) {
      forward_span<Z, kActivation>(z + begin, out + begin, end - begin);
    });
  }
}

template <typename Z>
void forward(const ActivationForward& call) {
  switch (call.activation) {
    case Activation::none:
      return forward<Z, Activation::none>(call);
    case Activation::relu:
      return forward<Z, Activation::relu>(call);
    case Activation::gelu:
      return forward<Z, Activation::gelu>(call);
    case Activation::gelu_tanh:
      return forward<Z, Activation::gelu_tanh>(call);
    case Activation::silu:
      return forward<Z, Activation::silu>(call);
    case Activation::swiglu:
      return forward<Z, Activation::swiglu>(call);
  }
}

struct Backward {
  ActivationGradient gradient;
  const void* grad;
  DType grad_type;
};

// Elements [begin, end) of a row of grad.
AK_SIMD_INLINE void backward_span(const Backward& b, int64_t row, int64_t begin, int64_t end) {
  const int64_t columns = b.gradient.columns;
  float buffer[kTile];
  for (int64_t c = begin; c < end; c += kTile) {
    const int64_t n = std::min(kTile, end - c);
    const float* grad = load_span(b.grad, b.grad_type, row * columns + c, n, buffer);
    b.gradient.span(grad, row, c, n, [](const float*, int64_t, int64_t) {});
  }
}

// Rows of an ungated activation are one contiguous span.
AK_SIMD_CLONES void backward_rows(const Backward& b, int64_t begin, int64_t end) {
  const int64_t columns = b.gradient.columns;
  if (!is_gated(b.gradient.activation)) return backward_span(b, 0, begin * columns, end * columns);
  for (int64_t row = begin; row < end; ++row) backward_span(b, row, 0, columns);
}

// The call with rows of `width` elements of z.
Backward backward_of(const ActivationBackward& call, int64_t width) {
  const int64_t columns = is_gated(call.activation) ? width / 2 : width;
  return {{call.activation, columns, width, call.z, call.type, call.out, call.type}, call.grad, call.grad_type};
}

}  // namespace

Status activation_forward(const ActivationForward& call, Stream) {
  with_narrow_dtype(call.type, [&]<typename Z>(Z) { forward<Z>(call); });
  return {};
}

AK_EXPORT Status activation_backward(const ActivationBackward& call, Stream) {
  if (call.sums != nullptr) {
    const int64_t width = call.columns;
    const Backward b = backward_of(call, width);
    const int64_t together =
        std::max<int64_t>(4, 4 * kTile / std::max<int64_t>(1, width));  // rows that fit the L1 cache
    sum_columns(call.rows, width, call.sums, [&](int64_t begin, int64_t end, float* strip) {
      for (int64_t row = begin; row < end; row += together) {
        const int64_t last = std::min(end, row + together);
        backward_rows(b, row, last);
        const char* const made = static_cast<const char*>(call.out) + row * width * bytes_of(call.type);
        add_rows(made, call.type, last - row, width, strip);
      }
    });
    return {};
  }
  const int64_t width = is_gated(call.activation) ? call.columns : 1;
  const int64_t rows = width == 0 ? 0 : call.rows * call.columns / width;
  const Backward b = backward_of(call, width);
  torch::stable::parallel_for(0, rows, rows_per_thread(width),
                              [&](int64_t begin, int64_t end) { backward_rows(b, begin, end); });
  return {};
}

}  // namespace ak
