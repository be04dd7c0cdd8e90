#pragma once
// What the asynchronous units (the async proxy) may do to memory, checked against what threads did before.
#include "device/tensor_map.cuh"
#include "emulator/machine.h"

namespace ak::emu {

struct Region;

/// XOR of the 16-byte chunk's number in its row with the row's number, as the hardware applies it to the address.
constexpr uint32_t swizzled(uint32_t address, Swizzle swizzle) {
  const uint32_t mask = row_bytes(swizzle) / 16 - 1;
  return address ^ ((address >> 7 & mask) << 4);
}

/// An asynchronous unit, asked by the running thread, is going to overwrite these bytes; they belong to `as` from now
/// on. Fails unless the thread knows that every earlier reader and writer is done, with a proxy fence after those that
/// were threads.
void claim_shared_for_async(Cta& cta, uint32_t offset, uint32_t bytes, Access as);
/// An asynchronous unit is going to read the granule at `offset` on behalf of a thread with `clock`.
void check_async_read(const Cta& cta, uint32_t offset, const Clock& clock);
/// Remembers that it reads [low, high), until somebody may overwrite them.
void note_async_read(Cta& cta, AsyncRead read);
/// A copy engine is going to read these bytes of global memory, asked by the running thread.
void check_async_global_read(Region& region, std::size_t offset, std::size_t bytes);
/// A store engine is going to write these bytes of global memory.
void claim_global_for_async(char* to, std::size_t bytes, Access as);

}  // namespace ak::emu
