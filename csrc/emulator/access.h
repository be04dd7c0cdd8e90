#pragma once
// Checked accesses of the running thread (the generic proxy) to global and shared memory.
#include <cstddef>
#include <cstdint>

namespace ak::emu {

struct Cta;
struct Region;

/// A kernel that may overlap the one in front must have waited for it (dependent_launch.h).
void check_previous_kernel();
void read_global(void* to, const void* from, std::size_t bytes, std::size_t alignment);
void write_global(void* to, const void* from, std::size_t bytes, std::size_t alignment);
/// Marks granules of a region as written by a kernel.
void mark_written(Region& region, std::size_t offset, std::size_t bytes);
/// Fails unless every granule has been written by the host or a kernel.
void check_initialised(const Region& region, std::size_t offset, std::size_t bytes);

/// Offset in the CTA's shared memory of the 32-bit address; fails if the bytes are not all inside what the launch asked
/// for.
uint32_t shared_offset(const Cta& cta, uint32_t address, std::size_t bytes);
/// The CTA of the running thread's cluster that a 32-bit address is in.
Cta& cta_at(uint32_t address);
void read_shared(void* to, uint32_t address, std::size_t bytes);
void write_shared(uint32_t address, const void* from, std::size_t bytes);

}  // namespace ak::emu
