// dropout: out = dropout(x) + residual. It is its own gradient: x is then the gradient of out, without a residual.
//
// Work: reads x (and residual), writes out: 4 or 6 bytes an element in 16 bits and some 35 instructions, 25 of them the
// generator's, so memory bandwidth is the limit. Plan: base/elementwise.cuh, 8 elements and two calls of the generator
// a thread. The seed is read from memory, so that a replayed CUDA graph draws a new mask.
//
// Trap: a thread with fewer than 8 elements left, or unaligned ones, moves them one by one. The mask depends on the
// element, not on the thread, so it is the same.
#include "dropout/call.h"

#include "base/elementwise.cuh"
#include "base/row.cuh"
#include "device/dependent_launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

/// `left`: elements from `at` to the end; `whole`: an aligned, whole vector.
template <int kVec>
AK_DEVICE void load_vector(float (&values)[kVec], const void* data, DType dtype, int64_t at, int64_t left, bool whole) {
  with_row_dtype(dtype, [&]<class T>(T) {
    if constexpr (kVec > kVectorOf<T>) return;  // no operand is fp32
    const T* from = static_cast<const T*>(data) + at;
    if (whole) {
      const auto v = load_vec<kVec, Cache::kStreaming>(from);
      AK_UNROLL
      for (int j = 0; j < kVec; j++) values[j] = to_float(v[j]);
    } else {
      AK_UNROLL
      for (int j = 0; j < kVec; j++) values[j] = j < left ? to_float(load(from + j)) : 0.0f;
    }
  });
}

template <int kVec>
AK_DEVICE void store_vector(const float (&values)[kVec], void* data, DType dtype, int64_t at, int64_t left,
                            bool whole) {
  with_row_dtype(dtype, [&]<class T>(T) {
    if constexpr (kVec > kVectorOf<T>) return;
    T* to = static_cast<T*>(data) + at;
    Vec<T, kVec> v;
    AK_UNROLL
    for (int j = 0; j < kVec; j++) v[j] = round_to<T>(values[j]);
    if (whole) {
      store_vec<Cache::kStreaming>(to, v);
    } else {
      AK_UNROLL
      for (int j = 0; j < kVec; j++) {
        if (j < left) store(to + j, v[j]);
      }
    }
  });
}

template <int kVec>
AK_KERNEL(kElementThreads, kElementBlocksPerSm)
dropout_kernel(AK_PARAM(Dropout) p, bool aligned) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const uint64_t seed = static_cast<uint64_t>(load(p.seed));
  const int64_t at = grid_thread() * kVec, left = p.count - at;
  if (left <= 0) return;
  const bool whole = aligned && left >= kVec;
  float v[kVec], added[kVec] = {};
  load_vector(v, p.x, p.x_type, at, left, whole);
  if (p.residual != nullptr) load_vector(added, p.residual, p.residual_type, at, left, whole);
  AK_UNROLL
  for (int j = 0; j < kVec; j += kDropoutGroup) {
    const Philox4 bits = dropout_bits(seed, static_cast<uint64_t>(at + j) / kDropoutGroup);
    AK_UNROLL
    for (int k = 0; k < kDropoutGroup; k++) v[j + k] = dropped_out(v[j + k], bits.word[k], p.rate) + added[j + k];
  }
  store_vector(v, p.out, p.out_type, at, left, whole);
}

}  // namespace

Status dropout(const Dropout& p, Stream stream) {
  if (p.count == 0) return {};
  const bool aligned = vector_aligned(p.x) && vector_aligned(p.residual) && vector_aligned(p.out);
  const bool wide = p.x_type == DType::kFloat32 || p.out_type == DType::kFloat32 ||
                    (p.residual != nullptr && p.residual_type == DType::kFloat32);
  const auto run = [&]<int kVec>(std::integral_constant<int, kVec>) {
    const int64_t vectors = (p.count + kVec - 1) / kVec;
    return launch(dropout_kernel<kVec>, elementwise_launch("dropout", vectors, stream), p, aligned);
  };
  return wide ? run(std::integral_constant<int, kVectorOf<float>>{})
              : run(std::integral_constant<int, kVectorOf<bf16>>{});
}

}  // namespace ak
