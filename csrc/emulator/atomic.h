#pragma once
// device/atomic.cuh on the emulator. Atomics are where threads of different blocks meet, so each one lets others run
// first; a relaxed one orders nothing unless fences stand around it.
#include <functional>

#include "emulator/access.h"
#include "emulator/machine.h"

namespace ak {
namespace emu {

enum class Order { kRelaxed, kAcqRel };

/// Calls `update(bytes)` on checked global memory as one step.
void atomic_global(void* p, std::size_t bytes, Order order, const std::function<void()>& update);
void fence_gpu();

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

inline void fence_gpu() {
  emu::enter("fence_gpu");
  emu::fence_gpu();
}

}  // namespace ak
