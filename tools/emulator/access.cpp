#include "emulator/access.h"

#include <cstring>

#include "emulator/machine.h"
#include "emulator/memory.h"

namespace ak::emu {
namespace {

void check_alignment(uintptr_t address, std::size_t alignment) {
  if (address % alignment != 0)
    fail(format("the address ends in 0x%x: not aligned to %zu bytes", static_cast<unsigned>(address % 256), alignment));
}

Shadow& shadow_of(Region& region) {
  if (!region.shadow) region.shadow = std::make_unique<Shadow>(region.bytes, region.granule);
  return *region.shadow;
}

[[noreturn]] void race(const char* what, const std::string& where, const char* earlier, Access access) {
  fail(format("race: %s of %s, %s by %s, with nothing that orders the two", what, where.c_str(), earlier,
              machine->describe(access.actor()).c_str()));
}

std::string in_region(const Region& region, std::size_t offset) {
  return format("'%s' + %zu bytes", region.name.c_str(), offset);
}
std::string in_shared(uint32_t offset) { return format("shared memory + 0x%x", offset); }

}  // namespace

void check_initialised(const Region& region, std::size_t offset, std::size_t bytes) {
  for (std::size_t i = offset; i < offset + bytes; i += region.granule) {
    if (!region.initialised[i / region.granule]) fail("uninitialised read of " + in_region(region, i));
  }
}

void mark_written(Region& region, std::size_t offset, std::size_t bytes) {
  if (!region.writable) fail("write to the read-only buffer " + in_region(region, offset));
  for (std::size_t i = offset; i < offset + bytes; i += region.granule) {
    region.initialised[i / region.granule] = true;
    region.written[i / region.granule] = true;
  }
}

void check_previous_kernel() {
  if (machine->shape.overlap_previous && !current->previous_done)
    fail("global memory is touched before wait_for_previous_kernel()");
}

void read_global(void* to, const void* from, std::size_t bytes, std::size_t alignment) {
  check_previous_kernel();
  check_alignment(reinterpret_cast<uintptr_t>(from), alignment);
  Region& region = global_memory().find(from, bytes);
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(from) - region.base);
  check_initialised(region, offset, bytes);
  if (Access racing = shadow_of(region).read(offset, bytes, current->clock)) {
    race("read", in_region(region, offset), "written", racing);
  }
  if (options().count_sectors) machine->sectors.note_read(from, bytes);
  std::memcpy(to, from, bytes);
}

void write_global(void* to, const void* from, std::size_t bytes, std::size_t alignment) {
  check_previous_kernel();
  check_alignment(reinterpret_cast<uintptr_t>(to), alignment);
  Region& region = global_memory().find(to, bytes);
  const auto offset = static_cast<std::size_t>(static_cast<char*>(to) - region.base);
  const Clock& clock = current->clock;
  const auto conflict = shadow_of(region).write(offset, bytes, clock, Access::of(clock.actor, clock.now));
  if (conflict.access)
    race("write", in_region(region, offset), conflict.was_write ? "written" : "read", conflict.access);
  mark_written(region, offset, bytes);
  if (options().count_sectors) {  // a vector of more than 16 bytes takes several instructions
    for (std::size_t i = 0; i < bytes; i += alignment)
      machine->sectors.note_write(*current, region, static_cast<char*>(to) + i, alignment);
  }
  std::memcpy(to, from, bytes);
}

Cta& cta_at(uint32_t address) {
  const auto& ctas = current->cta->cluster->ctas;
  const uint32_t rank = address >> 24;
  if (rank >= ctas.size()) fail(format("address 0x%x names CTA %u of a cluster of %zu", address, rank, ctas.size()));
  if (ctas[rank]->exited) fail(format("CTA %d, whose shared memory is used, has exited", ctas[rank]->index));
  return *ctas[rank];
}

uint32_t shared_offset(const Cta& cta, uint32_t address, std::size_t bytes) {
  const uint32_t inside = address & kWindow;
  const uint32_t offset = inside - kSharedBase;
  const uint32_t end = machine->shared_end();
  if (inside < kSharedBase || offset < machine->dynamic_offset || offset + bytes > end) {
    fail(format("%zu bytes at shared memory + 0x%x are outside of the block's 0x%x to 0x%x (CTA %d)", bytes, offset,
                machine->dynamic_offset, end, cta.index));
  }
  return offset;
}

void read_shared(void* to, uint32_t address, std::size_t bytes) {
  Cta& cta = cta_at(address);
  check_alignment(address & kWindow, bytes);
  const uint32_t offset = shared_offset(cta, address, bytes);
  for (uint32_t i = offset; i < offset + bytes; i += kGranule) {
    if (!cta.shadow->written(i)) fail("uninitialised read of " + in_shared(i));
  }
  if (Access racing = cta.shadow->read(offset, bytes, current->clock))
    race("read", in_shared(offset), "written", racing);
  std::memcpy(to, &cta.shared[offset], bytes);
}

void write_shared(uint32_t address, const void* from, std::size_t bytes) {
  Cta& cta = cta_at(address);
  check_alignment(address & kWindow, bytes);
  const uint32_t offset = shared_offset(cta, address, bytes);
  const Clock& clock = current->clock;
  for (const AsyncRead& r : cta.async_reads) {
    if (offset < r.high && offset + bytes > r.low && !clock.knows(r.actor, r.epoch)) {
      fail(format("race: write of %s, which %s may still read", in_shared(offset).c_str(),
                  machine->describe(r.actor).c_str()));
    }
  }
  const auto conflict = cta.shadow->write(offset, bytes, clock, Access::of(clock.actor, clock.now));
  if (conflict.access) race("write", in_shared(offset), conflict.was_write ? "written" : "read", conflict.access);
  std::memcpy(&cta.shared[offset], from, bytes);
}

}  // namespace ak::emu
