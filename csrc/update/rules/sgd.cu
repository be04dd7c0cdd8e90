// sgd_: one SGD step of every parameter, by the kernels of update/step.cuh.
//
// Work: 10 bytes (split master, no momentum, 16-bit gradient) to 22 bytes (fp32 weight, shadow, fp32 momentum and
// gradient) an element, 8 more with an average of the weights, and a handful of instructions: bandwidth-bound. A
// thread may have as little as 48 bytes in flight, so three blocks share an SM, two with extras, for which the
// registers suffice. Trap: a momentum buffer holds history if the parameter's own step count is above 1, and a skipped
// step does not advance the count. Before the first step that counts the buffer is fetched like any other operand and
// not used.
#include "update/rules/sgd.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::Sgd> : ak::Untuned<ak::Sgd> {
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 344;
  static constexpr int kTensors = 620, kExtrasTensors = 536, kTensors8 = 464;
};

AK_UPDATE_KERNELS(ak::Sgd)
