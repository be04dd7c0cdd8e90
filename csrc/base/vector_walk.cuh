// Processes a contiguous span of any alignment by a whole block, in 16-byte accesses.
#pragma once
#include <cstdint>
#include <type_traits>

#include "base/half.h"
#include "device/memory.cuh"
#include "device/tensor_list.cuh"

namespace ak {

/// Calls f(address, elements) for this thread's share of the `count` elements from `data` on. `elements` is a Vec
/// loaded from `address`: 16 bytes, or one element before the first and after the last 16-byte boundary. `f` may store
/// to `address`. The elements of a thread and their order depend on alignment and count alone. `kCache`: kDefault for a
/// span that is read again. `kInFlight`: vectors loaded together, the last ones too.
template <int kThreads, Cache kCache = Cache::kStreaming, int kInFlight = 4, class T, class F>
AK_DEVICE void for_each_vector(T* data, int count, F f) {
  constexpr int kWide = 16 / sizeof(T);
  const int thread = thread_index();

  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % kWide);
  const int to_boundary = (kWide - misaligned) % kWide;
  const int head = to_boundary < count ? to_boundary : count;
  const int vectors = (count - head) / kWide;
  const int tail = head + vectors * kWide;
  if (thread < head) f(data + thread, load_vec<1, kCache>(data + thread));
  if (thread < count - tail) f(data + tail + thread, load_vec<1, kCache>(data + tail + thread));

  constexpr int kStride = kThreads * kWide;
  T* at = data + head + thread * kWide;
  int left = vectors - thread;  // a thread takes every kThreads-th vector
  auto together = [&]<bool kAll>(std::bool_constant<kAll>) {
    Vec<std::remove_const_t<T>, kWide> v[kInFlight];
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {  // beyond the end the first vector is loaded again
      v[k] = load_vec<kWide, kCache>(at + (kAll || left > k * kThreads ? k * kStride : 0));
    }
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {
      if (!kAll && left <= k * kThreads) break;
      f(at + k * kStride, v[k]);
    }
  };
  for (; left > (kInFlight - 1) * kThreads; left -= kInFlight * kThreads, at += kInFlight * kStride) {
    together(std::true_type{});
  }
  if (left > 0) together(std::false_type{});
}

/// Calls f with a value of the type of `dtype`.
template <class F>
AK_DEVICE void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(fp16{});
    case DType::kBFloat16:
      return f(bf16{});
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
  }
}

}  // namespace ak
