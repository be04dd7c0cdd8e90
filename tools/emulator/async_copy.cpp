#include "emulator/async_copy.h"

#include <array>
#include <cstring>

#include "emulator/access.h"

namespace ak::emu {

void copy_async(uint32_t to, const void* from, int bytes, int from_bytes) {
  if (from_bytes < 0 || from_bytes > bytes) fail(format("from_bytes = %d, 0 to %d is accepted", from_bytes, bytes));
  if (reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(bytes) != 0) {
    fail(format("the global address is not aligned to %d bytes", bytes));
  }
  CopyGroups& copies = current->copies;
  if (!copies.used) {
    copies.used = true;
    copies.actor = machine->new_actor("a cp.async of " + machine->describe(current->clock.actor));
  }
  // The source is read now and arrives later. Until then the destination is NaN and belongs to the copy.
  uint8_t data[16] = {}, poison[16];
  std::memset(poison, 0xff, sizeof poison);
  if (from_bytes > 0) read_global(data, from, static_cast<std::size_t>(from_bytes), 1);
  write_shared(to, poison, static_cast<std::size_t>(bytes));
  Cta& cta = cta_at(to);
  const uint32_t offset = shared_offset(cta, to, static_cast<std::size_t>(bytes));
  cta.shadow->write(offset, static_cast<std::size_t>(bytes), current->clock,
                    Access::of(copies.actor, copies.committed + 1));
  Cta* target = &cta;
  copies.open.push_back(machine->post([target, offset, bytes, copied = std::to_array(data)] {
    std::memcpy(&target->shared[offset], copied.data(), static_cast<std::size_t>(bytes));
  }));
}

void copy_commit() {
  CopyGroups& copies = current->copies;
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
  copies.committed++;
}

void copy_wait(uint32_t allowed) {
  CopyGroups& copies = current->copies;
  while (copies.groups.size() > allowed) {
    for (AsyncId id : copies.groups.front()) machine->force(id);
    copies.groups.pop_front();
  }
  if (copies.used && copies.committed > allowed)
    current->clock.acquire(with(nullptr, copies.actor, copies.committed - allowed));
}

}  // namespace ak::emu
