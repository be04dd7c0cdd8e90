// Arithmetic primitives of all formulas.
//
// Each formula is written once, in its family's folder, and compiled by the host compiler (CPU kernels, `_host`, the
// emulator) and by nvcc (CUDA kernels), with the same bits everywhere. Nothing is left to the compiler: every fused
// multiply-add is an explicit ak::fma and contraction is off (-ffp-contract=off, -fmad=false), and ak::div and ak::sqrt
// round correctly even under -use_fast_math. No libm function is used whose last bit depends on the platform.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define AK_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__) || defined(__clang__)
// Forced inlining, so that a loop compiled for several instruction sets (base/cpu/simd.h) compiles the formula for
// each.
#define AK_HD inline __attribute__((always_inline))
#else
#define AK_HD inline
#endif

namespace ak {

// memcpy instead of std::bit_cast: it needs no --expt-relaxed-constexpr and compiles to a register move.
AK_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

AK_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

AK_HD uint64_t bits_of(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

AK_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

AK_HD float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

AK_HD double div(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

AK_HD float sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

AK_HD double sqrt(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

AK_HD float abs(float x) {
#if defined(__CUDA_ARCH__)
  return fabsf(x);  // free: a modifier of the consuming instruction
#else
  return float_of(bits_of(x) & 0x7fffffffu);
#endif
}

// Tests on bits, which hold under any fast-math flags.
AK_HD bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
AK_HD bool is_finite(double x) { return (bits_of(x) & 0x7ff0000000000000u) != 0x7ff0000000000000u; }
AK_HD bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }

// NaN if either is NaN; +0 and -0 are unordered.
AK_HD float min_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  return b < a || is_nan(b) ? b : a;
#endif
}

AK_HD float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
  return largest;
#else
  return a < b || is_nan(b) ? b : a;
#endif
}

}  // namespace ak
