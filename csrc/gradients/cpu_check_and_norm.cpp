// check_and_norm(grads, grad_scale, norm_type, per_tensor) -> (sum of squares or largest magnitude, found_inf)
// of the unscaled gradients, of all or of each; reads every gradient once, writes none.
//
// The sum is formed in double: squares of fp32 values neither overflow nor vanish in it. Its order is fixed (64 lanes
// within a chunk, chunks in order), so the result has the same bits for any number of threads. found_inf comes from the
// elements: finite gradients whose sum is not finite in fp32 are no overflow.
#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "base/tensor_table.h"
#include "gradients/clip.h"
#include "gradients/grad_norm.h"
#include "gradients/norm_type.h"

namespace ak {
namespace {

constexpr const char* kOp = "check_and_norm";
constexpr int64_t kLanes =
    64;  // enough that the additions of one lane, which wait for each other, do not limit the speed

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

// In one loop, so that the memory is busy while the processor adds: a pass for each question over a tile in the L1
// cache costs a quarter of the bandwidth.
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

struct Grad {
  const void* data;
  int64_t numel;
  ScalarType dtype;
};

Partial chunk_partial(const Grad& grad, const Chunk& chunk, float inv_scale, Norm norm) {
  switch (grad.dtype) {
    case ScalarType::Half:
      return chunk_partial<fp16>(grad.data, chunk, inv_scale, norm);
    case ScalarType::BFloat16:
      return chunk_partial<bf16>(grad.data, chunk, inv_scale, norm);
    case ScalarType::Float:
      return chunk_partial<float>(grad.data, chunk, inv_scale, norm);
    default:
      return chunk_partial<double>(grad.data, chunk, inv_scale, norm);
  }
}

std::tuple<Tensor, Tensor> run(const std::vector<Grad>& grads, const std::optional<Tensor>& grad_scale, Norm norm,
                               bool per_tensor) {
  const float inv_scale = grad_scale ? inverse_scale(read_scalar<float>(kOp, {"grad_scale"}, *grad_scale)) : 1.0f;

  const std::vector<Chunk> chunks =
      make_chunks(static_cast<int64_t>(grads.size()), [&](int64_t i) { return grads[static_cast<size_t>(i)].numel; });
  std::vector<Partial> partials(chunks.size());
  for_each_chunk(chunks, [&](int64_t index, const Chunk& chunk) {
    const Grad& grad = grads[static_cast<size_t>(chunk.tensor)];
    partials[static_cast<size_t>(index)] = chunk_partial(grad, chunk, inv_scale, norm);
  });
  std::vector<Partial> totals(per_tensor ? grads.size() : 1);
  for (size_t i = 0; i < chunks.size(); ++i) {
    totals[per_tensor ? static_cast<size_t>(chunks[i].tensor) : 0].add(partials[i]);
  }

  const std::vector<int64_t> shape(per_tensor ? 1 : 0, static_cast<int64_t>(grads.size()));
  const Tensor norms = torch::stable::empty(shape, ScalarType::Float);
  const Tensor found_inf = torch::stable::empty(shape, ScalarType::Float);
  float* norms_at = static_cast<float*>(norms.mutable_data_ptr());
  float* found_at = static_cast<float*>(found_inf.mutable_data_ptr());
  for (size_t i = 0; i < totals.size(); ++i) {
    norms_at[i] = norm == Norm::kLargest ? peak_value(totals[i].peak) : static_cast<float>(totals[i].sum_sq);
    found_at[i] = peak_is_finite(totals[i].peak) ? 0.0f : 1.0f;
  }
  return {norms, found_inf};
}

std::tuple<Tensor, Tensor> check_and_norm(const TensorList& list, const std::optional<Tensor>& grad_scale,
                                          double norm_type, bool per_tensor) {
  AK_CHECK(!list.empty(), kOp, ": grads must not be empty");
  const Norm norm = norm_of(kOp, norm_type);
  check_list(kOp, "grads", list);
  std::vector<Grad> grads;
  for (const Tensor& grad : list) grads.push_back({grad.const_data_ptr(), grad.numel(), grad.scalar_type()});
  return run(grads, grad_scale, norm, per_tensor);
}

std::tuple<Tensor, Tensor> check_and_norm_table(const Tensor&, const Tensor& table,
                                                const std::optional<Tensor>& grad_scale, bool per_tensor) {
  std::vector<Grad> grads;
  for (const TableRow& row : table_rows(kOp, {"table"}, table)) {
    const ArgName name{"grads", static_cast<int64_t>(grads.size())};
    const ScalarType dtype = table_dtype(kOp, name, row.grad_dtype, kListDtypes);
    grads.push_back({table_address(kOp, name, row.grad, row.numel, dtype), row.numel, dtype});
  }
  return run(grads, grad_scale, Norm::kSumOfSquares, per_tensor);
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("check_and_norm", TORCH_BOX(&ak::check_and_norm));
  m.impl("_check_and_norm_table", TORCH_BOX(&ak::check_and_norm_table));
}
