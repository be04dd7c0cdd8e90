// adamw_: one AdamW or Adam step of every parameter, by the kernels of update/step.cuh.
//
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and
// gradient) an element and some forty instructions, two of them divisions: bandwidth-bound. With eight elements of
// every operand in registers three blocks of 256 threads fit an SM; two run if elements are wide. An average of the
// weights moves 8 bytes more, AMSGrad 4 or 8; the kernel with these extras runs two blocks.
#include "update/rules/adamw.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::AdamW> : ak::Untuned<ak::AdamW> {
  static constexpr int kCommonMoments = 2;
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 2;
  static constexpr int kPrepareTensors = 400;
  static constexpr int kTensors = 528, kExtrasTensors = 416;
};

AK_UPDATE_KERNELS(ak::AdamW)
