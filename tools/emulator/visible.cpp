#include "emulator/visible.h"

#include <algorithm>

namespace ak::emu {
namespace {

void mark(Region& region, const char* begin, std::size_t bytes, bool initialised) {
  const auto first = static_cast<std::size_t>(begin - region.base);
  for (std::size_t b = first; b < first + bytes; b += region.granule)
    region.initialised[b / region.granule] = initialised;
}

}  // namespace

VisibleMemory::~VisibleMemory() {
  for (Region* region : regions_) global_memory().remove(region);
}

void VisibleMemory::add(std::string name, const void* data, std::size_t bytes, bool initialised, bool writable,
                        std::size_t granule) {
  if (bytes == 0) return;
  char* const begin = const_cast<char*>(static_cast<const char*>(data));
  Region whole;  // merged with all overlapping regions
  whole.name = std::move(name);
  whole.base = begin;
  char* end = begin + bytes;
  whole.writable = writable;
  const auto overlaps = [&](const Region* r) { return r->base < begin + bytes && r->base + r->bytes > begin; };
  const auto others = std::stable_partition(regions_.begin(), regions_.end(), [&](Region* r) { return !overlaps(r); });
  std::vector<Region> merged;
  for (auto it = others; it != regions_.end(); ++it) {
    Region& r = **it;
    if (it == others) whole.name = r.name;
    whole.base = std::min(whole.base, r.base);
    end = std::max(end, r.base + r.bytes);
    whole.writable |= r.writable;
    granule = std::min(granule, r.granule);
    merged.push_back(std::move(r));
    global_memory().remove(*it);
  }
  regions_.erase(others, regions_.end());
  whole.bytes = static_cast<std::size_t>(end - whole.base);
  Region* region = global_memory().add(whole.name, whole.base, whole.bytes, false, whole.writable, granule);
  for (const Region& r : merged) {
    for (std::size_t b = 0; b < r.bytes; b += r.granule)
      mark(*region, r.base + b, r.granule, r.initialised[b / r.granule]);
  }
  mark(*region, begin, bytes, initialised);
  regions_.push_back(region);
}

void VisibleMemory::set_initialised(const void* data, std::size_t bytes) {
  if (bytes > 0) mark(global_memory().find(data, bytes), static_cast<const char*>(data), bytes, true);
}

}  // namespace ak::emu
