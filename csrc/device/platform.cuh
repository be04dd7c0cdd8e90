#pragma once
// Qualifiers and indices of all kernels. csrc/device has two implementations: for nvcc, here, and for the emulator
// (tools/emulator, selected by AK_EMULATE), so that the same kernel source runs on a GPU and, checked, on a CPU.
#ifdef AK_EMULATE
#include "emulator/platform.h"
#else
#include <cuda_runtime.h>

#include <cstdint>

/// Declares a kernel: `template <int kRows> AK_KERNEL(256, 2) scale_kernel(float* out, AK_PARAM(Table) table) {...}`.
/// At most `max_threads` per block; registers are limited so that `min_blocks` blocks fit on one SM.
#define AK_KERNEL(max_threads, min_blocks) __global__ void __launch_bounds__(max_threads, min_blocks)
/// Declares a function called by kernels.
#define AK_DEVICE __device__ __forceinline__
/// Declares a kernel parameter of struct type: stays in constant memory without a copy on the stack, and its address
/// may be taken.
#define AK_PARAM(...) const __grid_constant__ __VA_ARGS__
#define AK_UNROLL _Pragma("unroll")
/// Prevents unrolling, which would multiply the code.
#define AK_NO_UNROLL _Pragma("unroll 1")

namespace ak {

inline constexpr int kWarpThreads = 32;

AK_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
AK_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
AK_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
AK_DEVICE int grid_blocks() { return static_cast<int>(gridDim.x); }

/// Hides the origin of `x` from the compiler, so that expressions of it are recomputed here instead of being hoisted
/// and kept in registers.
AK_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// opaque() for a pointer, which the compiler still knows to be in global memory.
template <class T>
AK_DEVICE T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}

}  // namespace ak
#endif

namespace ak {

AK_DEVICE int warp_index() { return thread_index() / kWarpThreads; }
AK_DEVICE int lane_index() { return thread_index() % kWarpThreads; }

}  // namespace ak
