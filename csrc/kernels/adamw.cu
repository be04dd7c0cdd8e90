// adamw_: one AdamW or Adam step of every parameter. The two kernels are those of kernels/update_step.cuh; here is what
// they need to know about AdamW.
//
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and
// gradient) an element and some forty instructions, two of them divisions: bandwidth is the limit. With eight elements
// of every operand in registers two blocks of 256 threads fit an SM, and near the 128 registers that leaves, ptxas
// starts to spill.
#include "kernels/adamw.h"

#include "kernels/update_step.cuh"

namespace ak {
namespace {

struct AdamWRule {
  using Options = AdamWOptions;
  using Scalars = AdamWScalars;
  static constexpr const char* kName = "adamw";
  static constexpr const char* kPrepareName = "adamw_prepare";
  static constexpr int kMoments = 2;
  static constexpr bool kMomentsOptional = false;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kPrepareTensors = 488;
  static constexpr int kTensors = 528;

  static AK_DEVICE Scalars scalars(const Options& options, float step) { return adamw_scalars(options, step); }
  static AK_DEVICE void update(float& weight, float (&moments)[2], bool, float grad, const Scalars& scalars) {
    adamw(weight, moments[0], moments[1], grad, scalars);
  }
};

}  // namespace

size_t adamw_scratch_bytes(size_t params) { return update_scratch_bytes<AdamWRule>(params); }

Status adamw(std::span<const ParamState> params, std::span<const AdamWGroup> groups, const StepDecisions& decisions,
             void* scratch, Stream stream) {
  return update_step<AdamWRule>(params, groups, decisions, scratch, stream);
}

}  // namespace ak
