#include "emulator/registers.h"

namespace ak::emu {

void change_registers(int wanted, bool increase) {
  constexpr int kGroupThreads = 128;
  Cta& cta = *current->cta;
  const auto index = static_cast<std::size_t>(current->index / kGroupThreads);
  int& owned = cta.registers[index];
  if (increase ? wanted < owned : wanted > owned) {
    fail(format("the warpgroup owns %d registers a thread and asks for %d", owned, wanted));
  }
  Warpgroup& group = *cta.warpgroups[index];
  meet(group.meeting, kGroupThreads, false);
  // The first thread to continue makes the change for the warpgroup.
  while (owned != wanted) {
    if (wanted - owned <= cta.registers_free) {
      cta.registers_free -= wanted - owned;
      owned = wanted;
      cta.waiting_for_registers.wake_all();
      return;
    }
    machine->block(cta.waiting_for_registers, [&cta, &owned, wanted] {
      return format("%d registers a thread, %d owned, only %d free in the block", wanted, owned, cta.registers_free);
    });
  }
}

}  // namespace ak::emu
