// sgd_: one SGD step of every parameter. The two kernels are those of update/step.cuh; here is what they need
// to know about SGD.
//
// Work: 10 bytes (split master, no momentum, 16-bit gradient) to 22 bytes (fp32 weight, shadow, fp32 momentum and
// gradient) an element, 8 more with an average of the weights, and a handful of instructions: bandwidth is the limit. A
// thread has as little as 48 bytes in flight, so three blocks share an SM, for which the registers suffice. Trap:
// whether a momentum buffer holds history is told by the parameter's own step count, which a skipped step does not
// advance; what lies in the buffer before the first step that counts is fetched like any other element, and never used.
#include "update/rules/sgd.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::Sgd> : ak::Untuned<ak::Sgd> {
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 3;
  static constexpr int kPrepareTensors = 440;
  static constexpr int kTensors = 620, kExtrasTensors = 536;
};

AK_UPDATE_KERNELS(ak::Sgd)
