#pragma once
// Warp-wide operations. All 32 lanes must call them.
#include "device/platform.cuh"

#ifdef AK_EMULATE
#include "emulator/warp.h"
#else

namespace ak {

/// Barrier and memory ordering among all lanes.
AK_DEVICE void warp_sync() { __syncwarp(); }
/// The value passed by lane (own lane ^ mask).
template <class T>
AK_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
/// The value passed by lane `lane`.
template <class T>
AK_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
/// Bit i is set if lane i passed true.
AK_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

}  // namespace ak
#endif

namespace ak {

/// op over the values of all lanes, with the same bits in every lane. `op` must be exactly commutative, as + and max
/// are.
template <class T, class Op>
AK_DEVICE T warp_reduce(T value, Op op) {
  AK_UNROLL
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask));
  return value;
}
template <class T>
AK_DEVICE T warp_sum(T value) {
  return warp_reduce(value, [](T a, T b) { return a + b; });
}
AK_DEVICE bool warp_any(bool predicate) { return ballot(predicate) != 0; }

}  // namespace ak
