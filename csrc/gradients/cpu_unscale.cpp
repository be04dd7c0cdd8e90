// unscale_(grads, found_inf, inv_scale): grads *= inv_scale in place, found_inf = 1 if any result is not finite.
// Without found_inf nothing is read or written for a factor of 1.
//
// torch's _amp_foreach_non_finite_check_and_unscale_ for a list of mixed dtypes, with one difference: the stored result
// is tested, not the scaled gradient, so a finite gradient that a scale below one unscales to inf is found.
#include <atomic>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gradients/clip.h"

namespace ak {
namespace {

constexpr const char* kOp = "unscale_";

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
bool unscale_chunk(const Tensor& grad, const Chunk& chunk, float inv_scale) {
  T* data = static_cast<T*>(grad.mutable_data_ptr());
  bool found = false;
  for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
    const int64_t n = std::min(kTile, chunk.end - at);
    unscale_span(data + at, n, inv_scale);
    found |= any_non_finite(data + at, n);
  }
  return found;
}

bool unscale_chunk(const Tensor& grad, const Chunk& chunk, float inv_scale) {
  switch (grad.scalar_type()) {
    case ScalarType::Half:
      return unscale_chunk<fp16>(grad, chunk, inv_scale);
    case ScalarType::BFloat16:
      return unscale_chunk<bf16>(grad, chunk, inv_scale);
    case ScalarType::Float:
      return unscale_chunk<float>(grad, chunk, inv_scale);
    default:
      return unscale_chunk<double>(grad, chunk, inv_scale);
  }
}

void unscale_(const TensorList grads, const std::optional<Tensor> found_inf, const Tensor inv_scale) {
  check_list(kOp, "grads", grads);
  const float factor = read_scalar<float>(kOp, {"inv_scale"}, inv_scale);
  float* flag = found_inf ? scalar_data<float>(kOp, {"found_inf"}, *found_inf) : nullptr;
  if (flag == nullptr && factor == 1.0f) return;

  const std::vector<Chunk> chunks =
      make_chunks(static_cast<int64_t>(grads.size()), [&](int64_t i) { return grads[static_cast<size_t>(i)].numel(); });
  std::atomic<bool> found{false};
  for_each_chunk(chunks, [&](int64_t, const Chunk& chunk) {
    if (unscale_chunk(grads[static_cast<size_t>(chunk.tensor)], chunk, factor))
      found.store(true, std::memory_order_relaxed);
  });
  if (flag != nullptr && found.load()) *flag = 1.0f;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("unscale_", TORCH_BOX(&ak::unscale_)); }
