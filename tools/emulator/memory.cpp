#include "emulator/memory.h"

#include <algorithm>

#include "emulator/error.h"

namespace ak::emu {

GlobalMemory& global_memory() {
  static GlobalMemory memory;
  return memory;
}

Region* GlobalMemory::add(std::string name, void* base, std::size_t bytes, bool initialised, bool writable,
                          std::size_t granule) {
  auto region = std::make_unique<Region>();
  region->name = std::move(name);
  region->base = static_cast<char*>(base);
  region->bytes = bytes;
  region->writable = writable;
  region->granule = granule;
  region->initialised.assign(bytes / granule + 1, initialised);
  region->written.assign(bytes / granule + 1, false);
  auto [it, fresh] = regions_.insert_or_assign(reinterpret_cast<uintptr_t>(base), std::move(region));
  last_ = nullptr;
  return it->second.get();
}

void GlobalMemory::remove(Region* region) {
  last_ = nullptr;
  regions_.erase(reinterpret_cast<uintptr_t>(region->base));
}

Region& GlobalMemory::find(const void* p, std::size_t bytes) {
  const auto* address = static_cast<const char*>(p);
  auto holds = [&](const Region& r) { return address >= r.base && address + bytes <= r.base + r.bytes; };
  if (last_ != nullptr && holds(*last_)) return *last_;
  auto next = regions_.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (next != regions_.begin()) {
    Region& below = *std::prev(next)->second;
    if (holds(below)) return *(last_ = &below);
    const auto past = static_cast<long long>(address + bytes - (below.base + below.bytes));
    if (past < (1 << 20)) {
      fail(format("out of bounds: %zu bytes that end %lld bytes after the end of '%s' (%zu bytes)", bytes, past,
                  below.name.c_str(), below.bytes));
    }
  }
  if (next != regions_.end() && next->second->base - address < (1 << 20)) {
    fail(format("out of bounds: %zu bytes that start %lld bytes before '%s'", bytes,
                static_cast<long long>(next->second->base - address), next->second->name.c_str()));
  }
  fail(format("out of bounds: %p is in no buffer that the emulator knows", p));
}

void GlobalMemory::start_launch() {
  for (auto& [base, region] : regions_) region->shadow.reset();
}

}  // namespace ak::emu
