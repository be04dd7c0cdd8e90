// exponent_histogram(tensors) -> (counts, largest) on a GPU: checks, memory, launch of gradients/exponent_histogram.cu.
#include "gradients/exponent_histogram.h"

#include "base/gpu/call.h"
#include "gradients/exponent.h"

namespace ak {
namespace {

constexpr const char* kOp = "exponent_histogram";

std::tuple<Tensor, Tensor> run_exponent_histogram(const TensorList& tensors) {
  AK_CHECK(!tensors.empty(), kOp, ": tensors must not be empty");
  GpuCall call(kOp, {"tensors", 0}, tensors[0]);
  const std::vector<GradRef> refs = call.refs<const void>("tensors", tensors);
  const int64_t n = static_cast<int64_t>(refs.size());
  const Tensor counts = call.empty({"counts"}, {n, kExponentBins}, ScalarType::Long);
  const Tensor largest = call.empty({"largest"}, {n}, ScalarType::Float);
  call.zero(counts, sizeof(int64_t) * kExponentBins * refs.size());
  call.zero(largest, sizeof(float) * refs.size());
  call.launch(exponent_histogram, refs, static_cast<uint64_t*>(counts.mutable_data_ptr()),
              static_cast<uint32_t*>(largest.mutable_data_ptr()));
  return {counts, largest};
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("exponent_histogram", TORCH_BOX(&ak::run_exponent_histogram)); }
