#include "device/atomic.cuh"

#include <map>

#include "emulator/machine.h"
#include "emulator/memory.h"

namespace ak::emu {

void atomic_global(void* p, std::size_t bytes, Order order, const std::function<void()>& update) {
  check_previous_kernel();
  machine->yield();
  Region& region = global_memory().find(p, bytes);
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail(format("the address is not aligned to %zu bytes", bytes));
  const auto offset = static_cast<std::size_t>(static_cast<char*>(p) - region.base);
  check_initialised(region, offset, bytes);
  Clock& clock = current->clock;
  if (!region.shadow) region.shadow = std::make_unique<Shadow>(region.bytes);
  const auto conflict = region.shadow->write(offset, bytes, clock, Access::of(clock.actor, clock.now, true));
  if (conflict.access) {
    fail(format("race: '%s' + %zu bytes is also touched without an atomic by %s", region.name.c_str(), offset,
                machine->describe(conflict.access.actor()).c_str()));
  }
  mark_written(region, offset, bytes);
  if (order == Order::kAcqRel) {
    Release& location = machine->atomic_location(p);
    const Knowledge before = location.take();
    clock.acquire(before);
    location.add(clock);
    location.add(before);
  }
  update();
}

void atomic_shared(uint32_t address, std::size_t bytes, const std::function<void(uint8_t*)>& update) {
  machine->yield();
  Cta& cta = cta_at(address);
  if (address % bytes != 0) fail(format("the address is not aligned to %zu bytes", bytes));
  const uint32_t offset = shared_offset(cta, address, bytes);
  if (!cta.shadow->written(offset)) fail(format("uninitialised read of shared memory + 0x%x", offset));
  const Clock& clock = current->clock;
  const auto conflict = cta.shadow->write(offset, bytes, clock, Access::of(clock.actor, clock.now, true));
  if (conflict.access) {
    fail(format("race: shared memory + 0x%x is also touched without an atomic by %s", offset,
                machine->describe(conflict.access.actor()).c_str()));
  }
  update(&cta.shared[offset]);
}

}  // namespace ak::emu
