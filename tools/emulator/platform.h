#pragma once
// device/platform.cuh on the emulator.
#include <cstdint>

#include "emulator/machine.h"

#define AK_KERNEL(max_threads, min_blocks) inline void
#define AK_DEVICE inline
#define AK_PARAM(...) const __VA_ARGS__&
#define AK_UNROLL
#define AK_NO_UNROLL

namespace ak {

inline constexpr int kWarpThreads = 32;

inline int thread_index() { return emu::current->index; }
inline int block_threads() { return emu::machine->shape.block; }
inline int block_index() { return emu::current->cta->index; }
inline int grid_blocks() { return emu::machine->shape.grid; }
inline int opaque(int x) { return x; }
template <class T>
T* opaque(T* p) {
  return p;
}

}  // namespace ak
