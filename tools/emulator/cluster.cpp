#include "emulator/cluster.h"

#include <array>
#include <cstring>

#include "emulator/access.h"
#include "emulator/mbarrier.h"

namespace ak::emu {

void store_cluster_2(uint32_t address, uint32_t barrier_address, uint32_t rank, float x, float y) {
  const uint32_t to = rank << 24 | (address & kWindow);
  const std::array<float, 2> values{x, y};
  uint8_t poison[sizeof values];
  std::memset(poison, 0xff, sizeof poison);
  write_shared(to, poison, sizeof poison);
  Cta& cta = cta_at(to);
  Barrier& barrier = barrier_at(cta, barrier_address, &cta != current->cta);
  const uint32_t offset = shared_offset(cta, to, sizeof values);
  // Until they arrive the bytes are NaN and belong to the barrier's phase.
  cta.shadow->write(offset, sizeof values, current->clock, Access::of(barrier.actor, barrier.completed + 1));
  barrier.release.add(current->clock);
  Cta* target = &cta;
  machine->post([target, offset, barrier_address, values] {
    if (target->exited) fail(format("a store arrives in CTA %d, which has exited", target->index));
    std::memcpy(&target->shared[offset], values.data(), sizeof values);
    complete_bytes(*target, barrier_address, sizeof values);
  });
}

}  // namespace ak::emu
