#pragma once
// device/prefetch.cuh on the emulator: moves nothing, but what is asked for must belong to a buffer.
#include <cstddef>
#include <cstdint>

#include "emulator/machine.h"

namespace ak {
namespace emu {

void prefetch_line(const void* p);
/// Whether kernels have asked for all `bytes` from `p` on since the lines were last forgotten.
bool prefetched(const void* p, std::size_t bytes);
void forget_prefetched();

}  // namespace emu

inline void prefetch_line(const void* p) {
  emu::enter("prefetch_line");
  emu::prefetch_line(p);
}

}  // namespace ak
