// Converts contiguous spans between fp16 and fp32, and fp32 to bf16, by x86-64 conversion instructions if the CPU has
// them. The formulas of base/half.h would take ten instructions per vector; the bits are the same.
#pragma once

#include "base/half.h"

namespace ak {

void widen_half(const fp16* from, float* to, int64_t n);
void round_half(const float* from, fp16* to, int64_t n);
void round_bf16(const float* from, bf16* to, int64_t n);

}  // namespace ak
