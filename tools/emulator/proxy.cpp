#include "emulator/proxy.h"

#include <algorithm>

#include "emulator/access.h"
#include "emulator/memory.h"

namespace ak::emu {
namespace {

/// Fails unless the generic access `access` to shared memory + `offset` is ordered, by a proxy fence, before the
/// operation that `clock`'s thread issues now.
void check_ordered(Access access, const Clock& clock, uint32_t offset, const char* did, const char* now) {
  const std::string who = machine->describe(access.actor());
  if (!clock.knows(access.actor(), access.epoch)) {
    fail(format("race: shared memory + 0x%x, %s by %s, is to be %s with nothing that orders the two", offset, did,
                who.c_str(), now));
  }
  const Clock* generic = machine->clock_of(access.actor());
  if (generic != nullptr && !proxy_fenced(*generic, access.epoch, clock)) {
    fail(format("shared memory + 0x%x, %s by %s, is to be %s by the async proxy without a fence_proxy_async() between",
                offset, did, who.c_str(), now));
  }
}

}  // namespace

void claim_shared_for_async(Cta& cta, uint32_t offset, uint32_t bytes, Access as) {
  const Clock& clock = current->clock;
  const char* now = "overwritten";
  Access last_write{};
  for (uint32_t i = offset; i < offset + bytes; i += kGranule) {
    const Access write = cta.shadow->last_write(i);
    if (write && write != last_write) check_ordered(write, clock, i, "written", now);
    last_write = write;
    cta.shadow->for_each_read(i, [&](Access read) { check_ordered(read, clock, i, "read", now); });
  }
  std::erase_if(cta.async_reads, [&](const AsyncRead& r) {
    if (r.low >= offset + bytes || r.high <= offset) return false;
    if (!clock.knows(r.actor, r.epoch)) {
      fail(format("shared memory + 0x%x of CTA %d is to be overwritten while %s may still read it", offset, cta.index,
                  machine->describe(r.actor).c_str()));
    }
    return true;
  });
  const auto barrier = cta.barriers.lower_bound(offset);
  if (barrier != cta.barriers.end() && barrier->first < offset + bytes) {
    fail(format("the mbarrier at shared memory + 0x%x is to be overwritten", barrier->first));
  }
  cta.shadow->write(offset, bytes, clock, as);
}

void check_async_read(const Cta& cta, uint32_t offset, const Clock& clock) {
  const Access write = cta.shadow->last_write(offset);
  if (!write) fail(format("uninitialised read of shared memory + 0x%x of CTA %d", offset, cta.index));
  check_ordered(write, clock, offset, "written", "read");
}

void note_async_read(Cta& cta, AsyncRead read) {
  for (AsyncRead& r : cta.async_reads) {
    if (r.low == read.low && r.high == read.high && r.actor == read.actor) {
      r.epoch = read.epoch;
      return;
    }
  }
  cta.async_reads.push_back(read);
}

void check_async_global_read(Region& region, std::size_t offset, std::size_t bytes) {
  if (!region.shadow) return;  // not accessed in this launch
  for (std::size_t i = offset; i < offset + bytes; i += region.granule) {
    const Access write = region.shadow->last_write(i);
    if (!write) continue;
    const bool generic = machine->clock_of(write.actor()) != nullptr;
    if (!generic && current->clock.knows(write.actor(), write.epoch)) continue;
    // fence_proxy_async() covers shared memory only; csrc/device has no wider fence, since no kernel needs it.
    fail(format("race: '%s' + %zu bytes, written by %s in this launch, is to be read by the async proxy%s",
                region.name.c_str(), i, machine->describe(write.actor()).c_str(),
                generic ? ", which no fence of csrc/device orders" : " with nothing that orders the two"));
  }
}

void claim_global_for_async(char* to, std::size_t bytes, Access as) {
  Region& region = global_memory().find(to, bytes);
  const auto offset = static_cast<std::size_t>(to - region.base);
  if (!region.shadow) region.shadow = std::make_unique<Shadow>(region.bytes);
  if (as.atomic()) check_initialised(region, offset, bytes);
  const auto conflict = region.shadow->write(offset, bytes, current->clock, as);
  if (conflict.access) {
    fail(format("race: '%s' + %zu bytes, %s by %s, is to be written with nothing that orders the two",
                region.name.c_str(), offset, conflict.was_write ? "written" : "read",
                machine->describe(conflict.access.actor()).c_str()));
  }
  mark_written(region, offset, bytes);
}

}  // namespace ak::emu
