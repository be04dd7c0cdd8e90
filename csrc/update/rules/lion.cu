// lion_: one Lion step of every parameter, by the kernels of update/step.cuh.
//
// Work: 14 bytes (split master, bf16 moment, 16-bit gradient) to 22 bytes (fp32 weight, shadow, fp32 moment and
// gradient) an element and a handful of instructions: bandwidth-bound. As in SGD with momentum a thread has two
// operands and the gradient in flight, and three blocks share an SM. An average of the weights moves 8 bytes more.
#include "update/rules/lion.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::Lion> : ak::Untuned<ak::Lion> {
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 344;
  static constexpr int kTensors = 620, kExtrasTensors = 536, kTensors8 = 464;
};

AK_UPDATE_KERNELS(ak::Lion)
