#pragma once
// Checked accesses to global and shared memory by the running thread (the generic proxy).
#include <cstddef>
#include <cstdint>

namespace ak::emu {

struct Cta;
struct Region;

/// Fails if the kernel may overlap the previous one and has not waited for it (dependent_launch.h).
void check_previous_kernel();
void read_global(void* to, const void* from, std::size_t bytes, std::size_t alignment);
void write_global(void* to, const void* from, std::size_t bytes, std::size_t alignment);
/// Marks granules of a region as written by a kernel.
void mark_written(Region& region, std::size_t offset, std::size_t bytes);
/// Fails unless the host or a kernel has written every granule.
void check_initialised(const Region& region, std::size_t offset, std::size_t bytes);

/// Offset of the 32-bit address in the CTA's shared memory; fails if any byte is outside the launch's allocation.
uint32_t shared_offset(const Cta& cta, uint32_t address, std::size_t bytes);
/// The CTA of the running thread's cluster that the 32-bit address refers to.
Cta& cta_at(uint32_t address);
void read_shared(void* to, uint32_t address, std::size_t bytes);
void write_shared(uint32_t address, const void* from, std::size_t bytes);

}  // namespace ak::emu
