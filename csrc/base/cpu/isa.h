// Which instructions the CPU's kernels use. A set is one of products of 16 bits, and bounds the vectors of functions of
// rows (vector_bits):
//
// - portable: ATen's fp32 matmul of widened operands, or plain C++ where a row must not depend on its neighbours;
// - avx2: fp32 multiply-adds of widened operands (AVX2, FMA, F16C);
// - avx512: the same with 512 bits (AVX-512 F, BW, DQ, VL);
// - avx512_bf16: vdpbf16ps for bf16, fp16 as with avx512;
// - amx: tdpbf16ps for bf16, fp16 as with avx512;
// - amx_emulated: the path of amx with its tile instructions in plain C++, slow and only on request.
//
// AMP_KERNELS_CPU_ISA names the one to use. Otherwise it is `portable` while torch.use_deterministic_algorithms(True)
// holds, whose bits the instructions of the machine do not change, else the best one that the CPU and the operating
// system offer.
#pragma once

namespace ak {

enum class Isa { portable, avx2, avx512, avx512_bf16, amx, amx_emulated };

// The choice for the next product. An error if AMP_KERNELS_CPU_ISA names what this machine does not have.
Isa current_isa();

// 512, 256 or 128: the vectors in which functions of rows compute, whose bits do not depend on them. The widest that
// the machine has, unless AMP_KERNELS_CPU_ISA names a set with narrower ones.
int vector_bits();

}  // namespace ak
