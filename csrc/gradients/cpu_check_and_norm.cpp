// check_and_norm on the CPU. Reads every gradient once.
//
// The sum is formed in double: squares of fp32 values neither overflow nor vanish in it. Its order is fixed (64 lanes
// within a chunk, chunks in order), so the bits are the same for any number of threads. found_inf comes from the
// elements: finite gradients whose sum is not finite in fp32 are no overflow.
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gradients/call.h"
#include "gradients/clip.h"
#include "gradients/grad_norm.h"

namespace ak {
namespace {

// Enough that the latency of additions to one lane does not limit the speed.
constexpr int64_t kLanes = 64;

struct Partial {
  double sum_sq = 0;
  uint32_t peak = 0;  // gradients/grad_norm.h

  void add(const Partial& other) {
    sum_sq += other.sum_sq;
    peak = std::max(peak, other.peak);
  }
};

float widened(fp16 x) { return to_float(x); }
float widened(bf16 x) { return to_float(x); }
float widened(float x) { return x; }
double widened(double x) { return x; }

// The running result of a chunk, lane by lane.
template <typename Wide>
struct Lanes {
  alignas(64) double sums[kLanes] = {};
  alignas(64) decltype(magnitude_bits(Wide{})) largest[kLanes] = {};
};

template <bool kSum, typename T, typename Wide>
AK_SIMD_INLINE void add_to_lanes(const T* __restrict x, Lanes<Wide>& lanes, int64_t n, float inv_scale) {
#pragma GCC ivdep
  for (int64_t lane = 0; lane < n; ++lane) {
    const Wide g = unscale(widened(x[lane]), inv_scale);
    const auto magnitude = magnitude_bits(g);
    lanes.largest[lane] = magnitude > lanes.largest[lane] ? magnitude : lanes.largest[lane];
    if (kSum) lanes.sums[lane] += static_cast<double>(g) * static_cast<double>(g);
  }
}

// One loop for both, so that the memory is busy while the processor adds: a pass each over a tile in the L1 cache would
// cost a quarter of the bandwidth.
template <bool kSum, typename T, typename Wide>
AK_SIMD_CLONES void add_span(const T* __restrict x, Lanes<Wide>& lanes, int64_t n, float inv_scale) {
  for (; n >= kLanes; n -= kLanes, x += kLanes) add_to_lanes<kSum>(x, lanes, kLanes, inv_scale);
  add_to_lanes<kSum>(x, lanes, n, inv_scale);
}

template <typename T>
Partial chunk_partial(const void* data, const Chunk& chunk, float inv_scale, Norm norm) {
  Lanes<decltype(widened(T{}))> lanes;
  const T* x = static_cast<const T*>(data) + chunk.begin;
  const int64_t n = chunk.end - chunk.begin;
  if (norm == Norm::kSumOfSquares) {
    add_span<true>(x, lanes, n, inv_scale);
  } else {
    add_span<false>(x, lanes, n, inv_scale);
  }
  Partial total;
  for (const double sum : lanes.sums) total.sum_sq += sum;
  total.peak = peak_of(*std::max_element(std::begin(lanes.largest), std::end(lanes.largest)));
  return total;
}

// The results of the whole list, or of each tensor.
Status run(std::span<const GradRef> grads, const float* grad_scale, Norm norm, bool per_tensor, float* results,
           float* found_infs) {
  const float inv_scale = grad_scale ? inverse_scale(*grad_scale) : 1.0f;
  const std::vector<Chunk> chunks = make_chunks(grads);
  std::vector<Partial> partials(chunks.size());
  for_each_chunk(chunks, [&](int64_t index, const Chunk& chunk) {
    const GradRef& grad = grads[static_cast<size_t>(chunk.tensor)];
    partials[static_cast<size_t>(index)] =
        with_dtype(grad.dtype, [&]<typename T>(T) { return chunk_partial<T>(grad.data, chunk, inv_scale, norm); });
  });
  std::vector<Partial> totals(per_tensor ? grads.size() : 1);
  for (size_t i = 0; i < chunks.size(); ++i) {
    totals[per_tensor ? static_cast<size_t>(chunks[i].tensor) : 0].add(partials[i]);
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    results[i] = norm == Norm::kLargest ? peak_value(totals[i].peak) : static_cast<float>(totals[i].sum_sq);
    found_infs[i] = peak_is_finite(totals[i].peak) ? 0.0f : 1.0f;
  }
  return {};
}

}  // namespace

size_t check_and_norm_scratch_bytes(std::span<const GradRef>) { return 0; }
size_t check_and_norm_per_tensor_scratch_bytes(std::span<const GradRef>) { return 0; }

Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void*, uint32_t*,
                      float* result, float* found_inf, Stream) {
  return run(grads, grad_scale, norm, false, result, found_inf);
}

Status check_and_norm_per_tensor(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void*,
                                 float* results, float* found_infs, Stream) {
  return run(grads, grad_scale, norm, true, results, found_infs);
}

}  // namespace ak
