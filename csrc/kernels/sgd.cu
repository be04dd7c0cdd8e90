// sgd_: one SGD step of every parameter. The two kernels are those of kernels/update_step.cuh; here is what they need
// to know about SGD.
//
// Work: 10 bytes (split master, no momentum, 16-bit gradient) to 22 bytes (fp32 weight, shadow, fp32 momentum and
// gradient) an element, 8 more with an average of the weights, and a handful of instructions: bandwidth is the limit. A
// thread has as little as 48 bytes in flight, so three blocks share an SM, for which the registers suffice. Trap:
// whether a momentum buffer holds history is told by the parameter's own step count, which a skipped step does not
// advance; what lies in the buffer before the first step that counts is fetched like any other element, and never used.
#include "kernels/sgd.h"

#include "kernels/update_step.cuh"

namespace ak {
namespace {

struct SgdRule {
  using Options = SgdOptions;
  using Scalars = SgdScalars;
  static constexpr const char* kName = "sgd";
  static constexpr const char* kPrepareName = "sgd_prepare";
  static constexpr int kMoments = 1;
  static constexpr int kRequiredMoments = 0, kCommonMoments = 1;
  static constexpr bool kMovesMoments = true;
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 3;
  static constexpr int kPrepareTensors = 500;
  static constexpr int kTensors = 620, kExtrasTensors = 536;

  static AK_DEVICE Scalars scalars(const Options& options, float step) { return sgd_scalars(options, step); }
  static AK_DEVICE void update(float& weight, float (&moments)[1], bool momentum, float grad, const Scalars& scalars) {
    if (momentum) {
      sgd_momentum(weight, moments[0], grad, scalars);
    } else {
      sgd(weight, grad, scalars);
    }
  }
};

}  // namespace

size_t sgd_scratch_bytes(std::span<const ParamState> params) { return update_scratch_bytes<SgdRule>(params.size()); }

Status sgd(std::span<const ParamState> params, std::span<const SgdGroup> groups, const StepDecisions& decisions,
           uint64_t seed, void* scratch, Stream stream) {
  return update_step<SgdRule>(params, groups, decisions, seed, scratch, stream);
}

}  // namespace ak
