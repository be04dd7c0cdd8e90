// lion_: one Lion step of every parameter. The two kernels are those of kernels/update_step.cuh; here is what they need
// to know about Lion.
//
// Work: 14 bytes (split master, bf16 moment, 16-bit gradient) to 22 bytes (fp32 weight, shadow, fp32 moment and
// gradient) an element and a handful of instructions: bandwidth is the limit. As in SGD with momentum a thread has two
// operands and the gradient in flight, and three blocks share an SM. An average of the weights moves 8 bytes more.
#include "kernels/lion.h"

#include "kernels/update_step.cuh"

namespace ak {
namespace {

struct LionRule {
  using Options = LionOptions;
  using Scalars = LionScalars;
  static constexpr const char* kName = "lion";
  static constexpr const char* kPrepareName = "lion_prepare";
  static constexpr int kMoments = 1;
  static constexpr int kRequiredMoments = 1, kCommonMoments = 1;
  static constexpr bool kMovesMoments = true;
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 3;
  static constexpr int kPrepareTensors = 568;
  static constexpr int kTensors = 620, kExtrasTensors = 536;

  static AK_DEVICE Scalars scalars(const Options& options, float) { return lion_scalars(options); }
  static AK_DEVICE void update(float& weight, float (&moments)[1], bool, float grad, const Scalars& scalars) {
    lion(weight, moments[0], grad, scalars);
  }
};

}  // namespace

size_t lion_scratch_bytes(std::span<const ParamState> params) { return update_scratch_bytes<LionRule>(params.size()); }

Status lion(std::span<const ParamState> params, std::span<const LionGroup> groups, const StepDecisions& decisions,
            uint64_t seed, void* scratch, Stream stream) {
  return update_step<LionRule>(params, groups, decisions, seed, scratch, stream);
}

}  // namespace ak
