// muon_: the elementwise passes of a Muon step, by the kernels of update/step.cuh.
//
// Work: before the matrix products 8 bytes (bf16 momentum, 16-bit gradient) to 14 bytes (fp32 both) an element. The
// iterate is only written: its old value is dead in the formula, so nvcc drops the load. After them 8 bytes (split
// master) to 12 bytes (fp32 weight, shadow), 8 more with an average of the weights. A handful of instructions:
// bandwidth-bound. A thread may have as little as 48 bytes in flight, so four blocks share an SM, three with extras.
#include "update/rules/muon.h"

#include "update/step.cuh"

template <>
struct ak::Tuned<ak::Muon> : ak::Untuned<ak::Muon> {
  static constexpr int kBlocksPerSm = 4, kExtrasBlocksPerSm = 3, kBlocksPerSm8 = 2;
  static constexpr int kPrepareTensors = 344;
  static constexpr int kTensors = 620, kExtrasTensors = 536, kTensors8 = 464;
};

AK_UPDATE_KERNELS(ak::Muon)
