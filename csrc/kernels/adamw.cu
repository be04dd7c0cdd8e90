// adamw_: one AdamW or Adam step of every parameter. The two kernels are those of kernels/update_step.cuh; here is what
// they need to know about AdamW.
//
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and
// gradient) an element and some forty instructions, two of them divisions: bandwidth is the limit. With eight elements
// of every operand in registers two blocks of 256 threads fit an SM, and near the 128 registers that leaves, ptxas
// starts to spill. An average of the weights moves 8 bytes more, AMSGrad 4 or 8; the kernel that knows them keeps to
// two blocks too.
#include "kernels/adamw.h"

#include "kernels/update_step.cuh"

namespace ak {
namespace {

struct AdamWRule {
  using Options = AdamWOptions;
  using Scalars = AdamWScalars;
  static constexpr const char* kName = "adamw";
  static constexpr const char* kPrepareName = "adamw_prepare";
  static constexpr int kMoments = 3;  // the third: the largest second moment so far
  static constexpr int kRequiredMoments = 2, kCommonMoments = 2;
  static constexpr bool kMovesMoments = true;
  static constexpr int kBlocksPerSm = 2, kExtrasBlocksPerSm = 2;
  static constexpr int kPrepareTensors = 440;
  static constexpr int kTensors = 528, kExtrasTensors = 416;

  static AK_DEVICE Scalars scalars(const Options& options, float step) { return adamw_scalars(options, step); }
  static AK_DEVICE void update(float& weight, float (&moments)[3], bool largest, float grad, const Scalars& scalars) {
    if (largest) {
      amsgrad(weight, moments[0], moments[1], moments[2], grad, scalars);
    } else {
      adamw(weight, moments[0], moments[1], grad, scalars);
    }
  }
};

}  // namespace

size_t adamw_scratch_bytes(std::span<const ParamState> params) {
  return update_scratch_bytes<AdamWRule>(params.size());
}

Status adamw(std::span<const ParamState> params, std::span<const AdamWGroup> groups, const StepDecisions& decisions,
             uint64_t seed, void* scratch, Stream stream) {
  return update_step<AdamWRule>(params, groups, decisions, seed, scratch, stream);
}

}  // namespace ak
