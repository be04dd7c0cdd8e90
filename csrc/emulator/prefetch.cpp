#include "emulator/prefetch.h"

#include <set>

#include "emulator/access.h"
#include "emulator/memory.h"

namespace ak::emu {
namespace {

uintptr_t line_of(const void* p) { return reinterpret_cast<uintptr_t>(p) / 128; }

std::set<uintptr_t>& lines() {
  static std::set<uintptr_t> lines;
  return lines;
}

}  // namespace

void prefetch_line(const void* p) {
  check_previous_kernel();
  global_memory().find(p, 1);
  lines().insert(line_of(p));
}

bool prefetched(const void* p, std::size_t bytes) {
  const uintptr_t last = line_of(static_cast<const char*>(p) + bytes - 1);
  for (uintptr_t line = line_of(p); line <= last; line++) {
    if (!lines().contains(line)) return false;
  }
  return true;
}

void forget_prefetched() { lines().clear(); }

}  // namespace ak::emu
