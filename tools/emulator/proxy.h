#pragma once
// Checks of memory accesses by asynchronous units (the async proxy) against earlier accesses by threads.
#include "device/tensor_map.cuh"
#include "emulator/machine.h"

namespace ak::emu {

struct Region;

/// XORs the index of the 16-byte chunk in its row with the row's index, as the hardware does with addresses.
constexpr uint32_t swizzled(uint32_t address, Swizzle swizzle) {
  const uint32_t mask = row_bytes(swizzle) / 16 - 1;
  return address ^ ((address >> 7 & mask) << 4);
}

/// Records that an asynchronous unit will overwrite these bytes on behalf of the running thread; they belong to `as`
/// from now on. Fails unless every earlier access is ordered before, with a proxy fence after accesses by threads.
void claim_shared_for_async(Cta& cta, uint32_t offset, uint32_t bytes, Access as);
/// Checks that an asynchronous unit may read the granule at `offset` on behalf of a thread with `clock`.
void check_async_read(const Cta& cta, uint32_t offset, const Clock& clock);
/// Records an asynchronous read, for checks of later writes.
void note_async_read(Cta& cta, AsyncRead read);
/// Checks that TMA may read these bytes of global memory on behalf of the running thread.
void check_async_global_read(Region& region, std::size_t offset, std::size_t bytes);
/// Records that TMA will write these bytes of global memory, after checking for races.
void claim_global_for_async(char* to, std::size_t bytes, Access as);

}  // namespace ak::emu
