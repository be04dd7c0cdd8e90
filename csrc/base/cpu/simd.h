// AK_SIMD_CLONES before a function compiles it once per x86-64 level; the loader picks the best one for the CPU.
//
// The libraries are built for baseline x86-64, which has no fma instruction, and formulas use explicit fmas: without
// clones each one is a call into libm, and a GELU costs 38 ns per element instead of 0.6. All clones give the same
// bits, because an fma rounds once on every path and contraction is off. Compilers without clones get correct but slow
// code.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define AK_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define AK_HAS_SIMD_CLONES 1
#else
#define AK_SIMD_CLONES
#define AK_HAS_SIMD_CLONES 0
#endif

// For functions inlined into one with clones; the second macro is for lambdas.
#if defined(__GNUC__)
#define AK_SIMD_INLINE inline __attribute__((always_inline))
#define AK_ALWAYS_INLINE __attribute__((always_inline))
#else
#define AK_SIMD_INLINE inline
#define AK_ALWAYS_INLINE
#endif

// Before a function that the module _nodes (csrc/autograd) calls, too.
#define AK_EXPORT __attribute__((visibility("default")))

// Intrinsics for one instruction set: always compiled, called if the CPU has it (base/cpu/isa.h).
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define AK_X86 1
#else
#define AK_X86 0
#endif
