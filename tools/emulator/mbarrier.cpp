#include "emulator/mbarrier.h"

#include <cstdlib>

namespace ak::emu {
namespace {

constexpr long kMaxBytes = (1 << 20) - 1;  // the transaction counter has 21 bits with its sign

void end_phase_if_complete(Cta& cta, Barrier& barrier) {
  if (barrier.pending < 0) fail(format("more than %d arrivals in one phase", barrier.count));
  if (std::labs(barrier.bytes) > kMaxBytes)
    fail(format("%ld bytes are more than the barrier can count", barrier.bytes));
  if (barrier.pending != 0) return;
  if (barrier.bytes < 0)
    fail(format("%ld bytes more than expected arrived on an mbarrier of CTA %d", -barrier.bytes, cta.index));
  if (barrier.bytes > 0) return;
  barrier.completed++;
  barrier.pending = barrier.count;
  barrier.release.add(barrier.published);
  barrier.published = with(barrier.release.take(), barrier.actor, barrier.completed);
  barrier.waiting.wake_all();
}

}  // namespace

void mbarrier_init(uint32_t address, int arrivals) {
  if (arrivals < 1) fail(format("arrivals = %d, at least 1 is needed", arrivals));
  Cta& cta = *current->cta;
  if (address >> 24 != static_cast<uint32_t>(cta.rank)) fail("an mbarrier is initialised by its own CTA");
  const uint64_t fresh = ~uint64_t{0};
  write_shared(address, &fresh, sizeof fresh);
  const uint32_t offset = shared_offset(cta, address, 8);
  Barrier& barrier = cta.barriers[offset];
  barrier = Barrier{};
  barrier.count = barrier.pending = arrivals;
  barrier.actor = machine->new_actor(
      format("a TMA load that ends on the mbarrier at shared memory + 0x%x of CTA %d", offset, cta.index));
  barrier.initialised = Access::of(current->clock.actor, current->clock.now);
}

void mbarrier_init_fence() {
  const Access fence = Access::of(current->clock.actor, current->clock.now++);
  for (auto& [offset, barrier] : current->cta->barriers) {
    if (barrier.initialised.actor() == fence.actor() && !barrier.init_fence) barrier.init_fence = fence;
  }
}

Barrier& barrier_at(Cta& cta, uint32_t address, bool across) {
  const uint32_t offset = shared_offset(cta, address, 8);
  auto it = cta.barriers.find(offset);
  if (it == cta.barriers.end())
    fail(format("no mbarrier was initialised at shared memory + 0x%x of CTA %d", offset, cta.index));
  Barrier& barrier = it->second;
  const Access first = across ? barrier.init_fence : barrier.initialised;
  if (across && !first) {
    fail(format("the mbarrier at shared memory + 0x%x of CTA %d was initialised without mbarrier_init_fence()", offset,
                cta.index));
  }
  if (!current->clock.knows(first.actor(), first.epoch)) {
    fail(format("the mbarrier at shared memory + 0x%x of CTA %d is used with no barrier after its initialisation",
                offset, cta.index));
  }
  return barrier;
}

void complete_bytes(Cta& cta, uint32_t address, long bytes) {
  Barrier& barrier = cta.barriers.at(shared_offset(cta, address, 8));
  barrier.bytes -= bytes;
  end_phase_if_complete(cta, barrier);
}

void mbarrier_arrive(uint32_t address, uint32_t cta_rank, long bytes) {
  const auto& ctas = current->cta->cluster->ctas;
  if (cta_rank >= ctas.size()) fail(format("CTA %u of a cluster of %zu", cta_rank, ctas.size()));
  Cta& cta = *ctas[cta_rank];
  if (cta.exited) fail(format("CTA %d, on whose mbarrier this arrives, has exited", cta.index));
  Barrier& barrier = barrier_at(cta, address, &cta != current->cta);
  barrier.bytes += bytes;
  barrier.pending--;
  barrier.release.add(current->clock);
  end_phase_if_complete(cta, barrier);
  if (machine->random.one_in(4)) machine->yield();
}

void mbarrier_wait(uint32_t address, int parity) {
  if (parity != 0 && parity != 1) fail(format("parity = %d, 0 or 1 is accepted", parity));
  Cta& cta = *current->cta;
  Barrier& barrier = barrier_at(cta, address, false);
  if (machine->random.one_in(4)) machine->yield();
  while (static_cast<int>(barrier.completed & 1) == parity) {
    machine->block(barrier.waiting, [&barrier, &cta, address, parity] {
      return format("mbarrier at shared memory + 0x%x, parity %d: %d of %d arrivals and %ld bytes are missing",
                    shared_offset(cta, address, 8), parity, barrier.pending, barrier.count, barrier.bytes);
    });
  }
  current->clock.acquire(barrier.published);
}

}  // namespace ak::emu
