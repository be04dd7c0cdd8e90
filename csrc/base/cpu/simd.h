// AK_SIMD_CLONES before a function compiles it once per x86-64 level; the loader picks the best one for the machine.
//
// The libraries are built for any x86-64, which has no fma instruction, and formulas write every fma out: without
// clones each one is a call into libm, and a GELU costs 38 ns an element instead of 0.6. All clones give the same bits,
// because an fma is rounded once whoever computes it and contraction is off. Where clones do not exist, the plain code
// is right and slow.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define AK_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define AK_HAS_SIMD_CLONES 1
#else
#define AK_SIMD_CLONES
#define AK_HAS_SIMD_CLONES 0
#endif

// Before a function that is a part of one with clones, so that it is compiled as often; the second one in a lambda.
#if defined(__GNUC__)
#define AK_SIMD_INLINE inline __attribute__((always_inline))
#define AK_ALWAYS_INLINE __attribute__((always_inline))
#else
#define AK_SIMD_INLINE inline
#define AK_ALWAYS_INLINE
#endif

// Before a function that the module _nodes (csrc/autograd) calls, too.
#define AK_EXPORT __attribute__((visibility("default")))

// Functions for one instruction set, by intrinsics: compiled everywhere, called where the CPU has it (gemm_isa.h).
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define AK_X86 1
#else
#define AK_X86 0
#endif
