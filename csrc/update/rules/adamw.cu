// adamw_: one AdamW or Adam step of every parameter, by the kernels of update/step.cuh.
//
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and
// gradient) an element and some forty instructions, two of them divisions: bandwidth-bound. Two blocks of 256 threads
// an SM keep eight elements of every operand in 128 registers a thread, which is what an SM holds. An H200 reached 93
// to 96 % of a copy's bandwidth with them on 2026-11-22, and 73 to 75 % with fp32 moments on 2026-11-26, when three
// blocks were resident and two were launched. The cause is not known: docs/gpu.md.
#include "update/rules/adamw.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::AdamW> : ak::Untuned<ak::AdamW> {
  static constexpr int kCommonMoments = 2;
  static constexpr int kBlocksPerSm = 2, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 320;
  static constexpr int kTensors = 528, kExtrasTensors = 416, kTensors8 = 312;
};

AK_UPDATE_KERNELS(ak::AdamW)
