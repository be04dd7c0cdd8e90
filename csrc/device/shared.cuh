#pragma once
// Shared memory. Static arrays are declared by shared<T, N>(); dynamic shared memory uses 32-bit shared addresses, as
// TMA, wgmma and mbarrier do.
#include "device/memory.cuh"

#ifdef AK_EMULATE
#include "emulator/shared.h"
#else

namespace ak {

/// Pointer to shared memory, for indexing and addition. On the emulator a class that checks every access.
template <class T>
using SharedPtr = T*;

/// Static shared array of N values. The same (T, N, Tag) always denotes the same array.
template <class T, int N, class Tag = void>
AK_DEVICE SharedPtr<T> shared() {
  __shared__ alignas(16) T storage[N];
  return storage;
}

/// Address of the dynamic shared memory, aligned to 16 bytes only.
AK_DEVICE uint32_t dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t ak_dynamic_shared[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(ak_dynamic_shared));
}

/// The dynamic shared memory at `address` as values of type T.
template <class T>
AK_DEVICE SharedPtr<T> shared_at(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

/// Loads 16 bytes from a 16-byte aligned address.
AK_DEVICE Vec<uint32_t, 4> load_shared_16(uint32_t address) {
  Vec<uint32_t, 4> v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.data[0]), "=r"(v.data[1]), "=r"(v.data[2]), "=r"(v.data[3])
               : "r"(address)
               : "memory");
  return v;
}
/// Loads two floats from an 8-byte aligned address.
AK_DEVICE Vec<float, 2> load_shared_2(uint32_t address) {
  Vec<float, 2> v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.data[0]), "=f"(v.data[1]) : "r"(address) : "memory");
  return v;
}
/// Stores 16 bytes to a 16-byte aligned address.
AK_DEVICE void store_shared_16(uint32_t address, const Vec<uint32_t, 4>& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.data[0]), "r"(v.data[1]), "r"(v.data[2]),
               "r"(v.data[3])
               : "memory");
}
/// Stores 4 bytes to a 4-byte aligned address.
AK_DEVICE void store_shared_4(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
/// Stores two floats to an 8-byte aligned address.
AK_DEVICE void store_shared_2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

}  // namespace ak
#endif
