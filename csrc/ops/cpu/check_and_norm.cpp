// check_and_norm(grads, grad_scale) -> (sum of squares, found_inf) of the unscaled gradients; reads every gradient
// once, writes none.
//
// The sum is formed in double: squares of fp32 values neither overflow nor vanish in it. Its order is fixed (64 lanes
// within a chunk, chunks in order), so the result has the same bits for any number of threads. found_inf comes from the
// elements: finite gradients whose sum is not finite in fp32 are no overflow.
#include "math/clip.h"
#include "math/half.h"
#include "ops/cpu/arguments.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/tile.h"

namespace ak {
namespace {

constexpr const char* kOp = "check_and_norm";
constexpr int64_t kLanes =
    64;  // enough that the additions of one lane, which wait for each other, do not limit the speed

struct Partial {
  double sum_sq;
  bool found;
};

float widened(fp16 x) { return to_float(x); }
float widened(bf16 x) { return to_float(x); }
float widened(float x) { return x; }
double widened(double x) { return x; }

template <typename T, typename Wide>
AK_SIMD_CLONES void unscaled_span(const T* __restrict x, Wide* __restrict g, int64_t n, float inv_scale) {
  for (int64_t i = 0; i < n; ++i) g[i] = unscale(widened(x[i]), inv_scale);
}

template <typename Wide>
AK_SIMD_CLONES void add_squares(const Wide* __restrict g, double* __restrict sums, int64_t n) {
  for (; n >= kLanes; n -= kLanes, g += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(g[lane]) * static_cast<double>(g[lane]);
  }
  for (int64_t lane = 0; lane < n; ++lane) sums[lane] += static_cast<double>(g[lane]) * static_cast<double>(g[lane]);
}

template <typename T>
Partial chunk_partial(const void* data, const Chunk& chunk, float inv_scale) {
  using Wide = decltype(widened(T{}));
  alignas(64) Wide tile[kTile];
  alignas(64) double sums[kLanes] = {};
  Partial total{0.0, false};
  for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
    const int64_t n = std::min(kTile, chunk.end - at);
    unscaled_span(static_cast<const T*>(data) + at, tile, n, inv_scale);
    total.found |= any_non_finite(tile, n);
    add_squares(tile, sums, n);
  }
  for (const double sum : sums) total.sum_sq += sum;
  return total;
}

Partial chunk_partial(const Tensor& grad, const Chunk& chunk, float inv_scale) {
  switch (grad.scalar_type()) {
    case ScalarType::Half:
      return chunk_partial<fp16>(grad.const_data_ptr(), chunk, inv_scale);
    case ScalarType::BFloat16:
      return chunk_partial<bf16>(grad.const_data_ptr(), chunk, inv_scale);
    case ScalarType::Float:
      return chunk_partial<float>(grad.const_data_ptr(), chunk, inv_scale);
    default:
      return chunk_partial<double>(grad.const_data_ptr(), chunk, inv_scale);
  }
}

Tensor scalar(float value) {
  Tensor result = torch::stable::empty({}, ScalarType::Float);
  *static_cast<float*>(result.mutable_data_ptr()) = value;
  return result;
}

std::tuple<Tensor, Tensor> check_and_norm(const TensorList grads, const std::optional<Tensor> grad_scale) {
  AK_CHECK(!grads.empty(), kOp, ": grads must not be empty");
  for (size_t i = 0; i < grads.size(); ++i) {
    const ArgName name{"grads", static_cast<int64_t>(i)};
    check_dtype(kOp, name, grads[i], {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double});
    check_cpu(kOp, name, grads[i]);
    check_dense(kOp, name, grads[i]);
  }
  const float inv_scale = grad_scale ? inverse_scale(read_scalar<float>(kOp, {"grad_scale"}, *grad_scale)) : 1.0f;

  const std::vector<Chunk> chunks =
      make_chunks(static_cast<int64_t>(grads.size()), [&](int64_t i) { return grads[static_cast<size_t>(i)].numel(); });
  std::vector<Partial> partials(chunks.size());
  for_each_chunk(chunks, [&](int64_t index, const Chunk& chunk) {
    partials[static_cast<size_t>(index)] = chunk_partial(grads[static_cast<size_t>(chunk.tensor)], chunk, inv_scale);
  });
  Partial total{0.0, false};
  for (const Partial& p : partials) {
    total.sum_sq += p.sum_sq;
    total.found |= p.found;
  }
  return {scalar(static_cast<float>(total.sum_sq)), scalar(total.found ? 1.0f : 0.0f)};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("check_and_norm", TORCH_BOX(&ak::check_and_norm)); }
