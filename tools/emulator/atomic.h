#pragma once
// device/atomic.cuh on the emulator. Atomics synchronize threads of different blocks, so each one yields first. Relaxed
// atomics order no accesses.
#include <cstring>
#include <functional>

#include "emulator/access.h"
#include "emulator/machine.h"

namespace ak {
namespace emu {

enum class Order { kRelaxed, kAcqRel };

/// Calls `update()` atomically after checking the global memory at `p`.
void atomic_global(void* p, std::size_t bytes, Order order, const std::function<void()>& update);
/// Calls `update(bytes)` atomically on checked shared memory of the running thread's block; orders nothing.
void atomic_shared(uint32_t address, std::size_t bytes, const std::function<void(uint8_t*)>& update);

}  // namespace emu

template <class T>
T atomic_add(T* p, T value) {
  emu::enter("atomic_add");
  T old;
  emu::atomic_global(p, sizeof(T), emu::Order::kRelaxed, [&] {
    old = *p;
    *p = old + value;
  });
  return old;
}

template <class T>
T atomic_add(SharedPtr<T> p, T value) {
  emu::enter("atomic_add");
  T old;
  emu::atomic_shared(p.address(), sizeof(T), [&](uint8_t* bytes) {
    std::memcpy(&old, bytes, sizeof old);
    const T sum = old + value;
    std::memcpy(bytes, &sum, sizeof sum);
  });
  return old;
}

inline void atomic_max(uint32_t* p, uint32_t value) {
  emu::enter("atomic_max");
  emu::atomic_global(p, sizeof *p, emu::Order::kRelaxed, [&] { *p = *p < value ? value : *p; });
}

inline uint32_t atomic_count_acq_rel(uint32_t* p, uint32_t last) {
  emu::enter("atomic_count_acq_rel");
  uint32_t old;
  emu::atomic_global(p, sizeof *p, emu::Order::kAcqRel, [&] {
    old = *p;
    *p = old >= last ? 0 : old + 1;
  });
  return old;
}

inline void store_relaxed(float* p, float value) {
  emu::enter("store_relaxed");
  emu::atomic_global(p, sizeof *p, emu::Order::kRelaxed, [&] { *p = value; });
}

}  // namespace ak
