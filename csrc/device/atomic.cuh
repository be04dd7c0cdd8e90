#pragma once
// Atomic operations on global and shared memory.
#include "device/shared.cuh"

#ifdef AK_EMULATE
#include "emulator/atomic.h"
#else

namespace ak {

/// *p += value, relaxed, in global or shared memory; returns the old value. The order of additions is not fixed, so do
/// not use it for floating-point sums that must be reproducible.
template <class T>
AK_DEVICE T atomic_add(T* p, T value) {
  return atomicAdd(p, value);
}
AK_DEVICE uint64_t atomic_add(uint64_t* p, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(value));
}

/// *p = max(*p, value), relaxed.
AK_DEVICE void atomic_max(uint32_t* p, uint32_t value) { atomicMax(p, value); }

/// Wrapping increment: *p = *p >= last ? 0 : *p + 1; returns the old value. Acquire-release at GPU scope: writes before
/// an increment are visible after a later increment. Wrapping resets the counter for the next launch.
AK_DEVICE uint32_t atomic_count_acq_rel(uint32_t* p, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
  return old;
}

/// *p = value, relaxed, so that several threads may store the same value without a data race.
AK_DEVICE void store_relaxed(float* p, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(value) : "memory");
}

}  // namespace ak
#endif
