#pragma once
// device/warp.cuh on the emulator: lanes exchange values at a barrier of the warp. Only warp_sync orders memory
// accesses.
#include <cstring>

#include "emulator/machine.h"

namespace ak {
namespace emu {

/// Slots of the running warp's next collective.
inline uint64_t (&warp_slots()) [kWarpSize][4] { return current->warp->slot[current->warp->meeting.generation % 2]; }

/// Returns the `value` of lane `from_lane`.
template <class T>
T exchange(T value, int from_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (from_lane < 0 || from_lane >= kWarpSize) fail(format("lane %d is not in the warp", from_lane));
  auto& slots = warp_slots();
  std::memcpy(&slots[current->lane()][0], &value, sizeof value);
  meet_warp(false);
  T result;
  std::memcpy(&result, &slots[from_lane][0], sizeof result);
  return result;
}

}  // namespace emu

inline void warp_sync() {
  emu::enter("warp_sync");
  emu::meet_warp(true);
}
template <class T>
T shuffle_xor(T value, int mask) {
  emu::enter("shuffle_xor");
  return emu::exchange(value, emu::current->lane() ^ mask);
}
template <class T>
T shuffle(T value, int lane) {
  emu::enter("shuffle");
  return emu::exchange(value, lane);
}
inline uint32_t ballot(bool predicate) {
  emu::enter("ballot");
  auto& slots = emu::warp_slots();
  slots[emu::current->lane()][0] = predicate;
  emu::meet_warp(false);
  uint32_t bits = 0;
  for (int i = 0; i < emu::kWarpSize; i++) bits |= static_cast<uint32_t>(slots[i][0]) << i;
  return bits;
}

}  // namespace ak
