#include "emulator/sectors.h"

#include <algorithm>

#include "emulator/machine.h"
#include "emulator/memory.h"

namespace ak::emu {
namespace {

/// The bytes [first, last) of a sector as bits.
uint32_t bits_between(uintptr_t first, uintptr_t last) {
  return static_cast<uint32_t>((uint64_t{1} << last) - (uint64_t{1} << first));
}

}  // namespace

void SectorCount::note_read(const void* p, std::size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  for (uintptr_t sector = at / kSector; sector <= (at + bytes - 1) / kSector; sector++) read_.insert(sector);
}

void SectorCount::note_write(const Thread& thread, const Region& region, const void* p, std::size_t bytes) {
  Store& store = stores_[{thread.warp, &region, next_[{&thread, &region}]++}];
  store.lanes++;
  const auto at = reinterpret_cast<uintptr_t>(p), base = reinterpret_cast<uintptr_t>(region.base);
  for (uintptr_t sector = at / kSector; sector <= (at + bytes - 1) / kSector; sector++) {
    const uintptr_t begin = sector * kSector;
    const auto part = [&](uintptr_t first, uintptr_t last) {
      return bits_between(std::clamp(first, begin, begin + kSector) - begin,
                          std::clamp(last, begin, begin + kSector) - begin);
    };
    auto& [written, there] = store.sectors[sector];
    written |= part(at, at + bytes);
    there = part(base, base + region.bytes);
  }
}

int SectorCount::halves() const {
  int count = 0;
  for (const auto& [instruction, store] : stores_) {
    if (store.lanes == 1) continue;
    for (const auto& [sector, bytes] : store.sectors) count += bytes.first != bytes.second && !read_.contains(sector);
  }
  return count;
}

}  // namespace ak::emu
