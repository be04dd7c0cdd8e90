// bf16 by vdpbf16ps, which adds the products of two pairs to each of 16 fp32 sums.
//
// Work: 64 flops an instruction, twice the rate of the fp32 multiply-add; 8 x 48 sums in 24 registers need 11 loads for
// 24 instructions.
//
// Traps: the instruction takes subnormal operands and sums for zero and flushes subnormal results; it rounds to nearest
// even after each of the two products, whatever MXCSR says (docs/cpu.md).
#include "base/cpu/simd.h"

#if AK_X86
#define AK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#include "gemm/cpu/avx512.h"
#include "gemm/cpu/tile.h"

namespace ak {
namespace {

struct Bf16Pairs : PairWords {
  static AK_VECTOR Sums multiply_add(Words a, Words b, Sums sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

constexpr Kernel kKernel = tile_kernel<Bf16Pairs, 8, 3>(/*depth=*/256);

}  // namespace

const Kernel& avx512_bf16_kernel() { return kKernel; }

}  // namespace ak
#endif
