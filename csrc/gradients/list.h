// Lists of gradients as kernel arguments, for the kernels that read each element once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/tensor_list.h"
#include "device/tensor_list.cuh"
#include "gradients/call.h"

namespace ak {

/// The gradients of one launch.
template <class Void, int N>
struct GradListArgs {
  static constexpr int kTensors = N;
  ListMap<N> map;
  Void* data[N];
  DType dtype[N];

  void set(int place, const GradRefTo<Void>& grad, size_t) {
    data[place] = grad.data;
    dtype[place] = grad.dtype;
  }
};
inline constexpr int kGradListTensors = 1536;
static_assert(sizeof(GradListArgs<void, kGradListTensors>) + 128 <= kArgumentBytes,
              "the list and the other arguments must fit one launch");
inline constexpr int kShortGradListTensors = 187;
static_assert(sizeof(GradListArgs<void, kShortGradListTensors>) + 128 <= kFewArgumentBytes,
              "a short list and the other arguments must fit a launch of few bytes");

/// f<Args>() with the GradListArgs for a list of this length. Results are the same with both.
template <class Void, class F>
auto with_grad_list(std::span<const GradRefTo<Void>> grads, F f) {
  using Short = GradListArgs<Void, kShortGradListTensors>;
  if (launch_count<Short>(grads) <= 1) return f.template operator()<Short>();
  return f.template operator()<GradListArgs<Void, kGradListTensors>>();
}

/// Also holds their positions in the whole list, empty tensors included.
template <class Void, int N>
struct PlacedGradListArgs : GradListArgs<Void, N> {
  int32_t position[N];

  void set(int place, const GradRefTo<Void>& grad, size_t number) {
    GradListArgs<Void, N>::set(place, grad, number);
    position[place] = static_cast<int32_t>(number);
  }
};
inline constexpr int kPlacedGradListTensors = 1280;
static_assert(sizeof(PlacedGradListArgs<void, kPlacedGradListTensors>) + 128 <= kArgumentBytes,
              "the list and the other arguments must fit one launch");

}  // namespace ak
