// Stretches of fp16 to fp32 and back, and of fp32 to bf16, 16 numbers or more at a time by the instructions of x86-64
// where the CPU has them. The formulas of base/half.h in vector code take ten instructions a vector; their results are
// these.
#pragma once

#include "base/half.h"

namespace ak {

void widen_half(const fp16* from, float* to, int64_t n);
void round_half(const float* from, fp16* to, int64_t n);
void round_bf16(const float* from, bf16* to, int64_t n);

}  // namespace ak
