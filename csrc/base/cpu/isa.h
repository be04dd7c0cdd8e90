// The instruction set of the CPU's kernels. It selects the kernel of 16-bit products and bounds the vectors of
// functions of rows (vector_bits):
//
// - portable: ATen's fp32 matmul of widened operands, or plain C++ where a row must not depend on its neighbours;
// - avx2: fp32 multiply-adds of widened operands (AVX2, FMA, F16C);
// - avx512: the same with 512 bits (AVX-512 F, BW, DQ, VL);
// - avx512_bf16: vdpbf16ps for bf16, fp16 as with avx512;
// - amx: tdpbf16ps for bf16, fp16 as with avx512;
// - amx_emulated: the path of amx with its tile instructions in plain C++, slow and only on request.
//
// AMP_KERNELS_CPU_ISA names the set to use. Otherwise it is `portable`, whose bits do not depend on the machine's
// instructions, while torch.use_deterministic_algorithms(True) holds, else the best one that the CPU and the operating
// system offer.
#pragma once

namespace ak {

enum class Isa { portable, avx2, avx512, avx512_bf16, amx, amx_emulated };

// The set of the next product. Throws if AMP_KERNELS_CPU_ISA names one that this machine does not have.
Isa current_isa();

// Vector width of functions of rows: 512, 256 or 128. Their bits do not depend on it. The widest of the machine, unless
// AMP_KERNELS_CPU_ISA names a set with narrower vectors.
int vector_bits();

}  // namespace ak
