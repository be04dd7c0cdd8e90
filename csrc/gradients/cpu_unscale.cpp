// unscale_ on the CPU: torch's _amp_foreach_non_finite_check_and_unscale_ for a list of mixed dtypes, with one
// difference: the stored result is tested, not the scaled gradient, so a finite gradient that a scale below one
// unscales to inf is found.
#include <atomic>

#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gradients/call.h"
#include "gradients/clip.h"

namespace ak {
namespace {

template <typename T>
AK_SIMD_CLONES void unscale_span(T* x, int64_t n, float inv_scale) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_to<T>(unscale(to_float(x[i]), inv_scale));
}

template <>
AK_SIMD_CLONES void unscale_span<double>(double* x, int64_t n, float inv_scale) {
  for (int64_t i = 0; i < n; ++i) x[i] = unscale(x[i], inv_scale);
}

// True if a result is not finite. The test is a loop of its own, over a tile that is still in the L1 cache: gcc
// vectorises the two apart, not together.
template <typename T>
bool unscale_chunk(T* data, const Chunk& chunk, float inv_scale) {
  bool found = false;
  for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
    const int64_t n = std::min(kTile, chunk.end - at);
    unscale_span(data + at, n, inv_scale);
    found |= any_non_finite(data + at, n);
  }
  return found;
}

}  // namespace

Status unscale(std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale, Stream) {
  const float factor = *inv_scale;
  if (found_inf == nullptr && factor == 1.0f) return {};
  std::atomic<bool> found{false};
  for_each_chunk(make_chunks(grads), [&](int64_t, const Chunk& chunk) {
    const MutableGradRef& grad = grads[static_cast<size_t>(chunk.tensor)];
    const bool here =
        with_dtype(grad.dtype, [&]<typename T>(T) { return unscale_chunk(static_cast<T*>(grad.data), chunk, factor); });
    if (here) found.store(true, std::memory_order_relaxed);
  });
  if (found_inf != nullptr && found.load()) *found_inf = 1.0f;
  return {};
}

}  // namespace ak
