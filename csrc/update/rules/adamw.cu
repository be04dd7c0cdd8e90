// adamw_: one AdamW or Adam step of every parameter. The two kernels are those of update/step.cuh; here is what
// they need to know about AdamW.
//
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and
// gradient) an element and some forty instructions, two of them divisions: bandwidth is the limit. With eight elements
// of every operand in registers three blocks of 256 threads fit an SM; two run where elements are wide. An average of
// the weights moves 8 bytes more, AMSGrad 4 or 8; the kernel that knows them keeps to two blocks.
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
