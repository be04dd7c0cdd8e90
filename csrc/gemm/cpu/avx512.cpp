// fp16 and bf16 by fp32 multiply-adds of 512 bits: operands are widened, exactly, when they are packed.
//
// Work: 32 flops an instruction; 8 x 48 sums in 24 registers need 11 loads for 24 instructions.
#include "base/cpu/simd.h"

#if AK_X86
#define AK_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#include "gemm/cpu/avx512.h"
#include "gemm/cpu/tile.h"

namespace ak {
namespace {

constexpr Kernel kBf16 = tile_kernel<WideWords<true>, 8, 3>(/*depth=*/192);
constexpr Kernel kFp16 = tile_kernel<WideWords<false>, 8, 3>(/*depth=*/192);

}  // namespace

const Kernel& avx512_kernel(bool is_bf16) { return is_bf16 ? kBf16 : kFp16; }

}  // namespace ak
#endif
