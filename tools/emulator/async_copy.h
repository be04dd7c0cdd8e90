#pragma once
// device/async_copy.cuh on the emulator.
#include "emulator/machine.h"

namespace ak {
namespace emu {

void copy_async(uint32_t to, const void* from, int bytes, int from_bytes);
void copy_commit();
void copy_wait(uint32_t allowed);

}  // namespace emu

template <int kBytes, bool kKeep = false>
void copy_async(uint32_t to, const void* from, int from_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
  emu::enter("copy_async");
  emu::copy_async(to, from, kBytes, from_bytes);
}
inline void copy_commit() {
  emu::enter("copy_commit");
  emu::copy_commit();
}
template <int N>
void copy_wait() {
  emu::enter("copy_wait");
  emu::copy_wait(N);
}

}  // namespace ak
