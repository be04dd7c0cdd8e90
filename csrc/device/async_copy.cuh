#pragma once
// cp.async: copies 4, 8 or 16 bytes from global to shared memory asynchronously; synchronously before sm_80.
#include "device/shared.cuh"

#ifdef AK_EMULATE
#include "emulator/async_copy.h"
#else

namespace ak {

/// Copies the first `from_bytes` of kBytes to shared address `to` and fills the rest with zeros. Both addresses are
/// aligned to kBytes, even if from_bytes is 0. 16-byte copies bypass L1 unless kKeep, for 32-byte sectors that the
/// block will soon read again; smaller ones never do.
template <int kBytes, bool kKeep = false>
AK_DEVICE void copy_async(uint32_t to, const void* from, int from_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  const auto* bytes = static_cast<const uint8_t*>(from);
  if (from_bytes == kBytes) {
    shared_at<Vec<uint8_t, kBytes> >(to)[0] = load_vec<kBytes>(bytes);
  } else {
    for (int i = 0; i < kBytes; i++) shared_at<uint8_t>(to)[i] = i < from_bytes ? load(bytes + i) : uint8_t{0};
  }
#else
  if constexpr (kBytes == 16 && !kKeep) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(from_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(from_bytes)
                 : "memory");
  }
#endif
}
/// Commits this thread's copies since the last commit as a group.
AK_DEVICE void copy_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/// Waits for all but the last N groups of this thread. Other threads see the bytes after a barrier.
template <int N>
AK_DEVICE void copy_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

}  // namespace ak
#endif
