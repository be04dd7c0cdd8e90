#include "emulator/tma.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "emulator/access.h"
#include "emulator/mbarrier.h"
#include "emulator/memory.h"
#include "emulator/proxy.h"

namespace ak::emu {
namespace {

/// Rows of a box: their addresses in global and shared memory, and their elements in bounds.
struct BoxCopy {
  TensorMapSpec spec;
  Box at;
  uint32_t shared;  // offset of the box

  uint32_t row_count() const {
    return spec.box[1] * (spec.rank > 2 ? spec.box[2] : 1) * (spec.rank > 3 ? spec.box[3] : 1);
  }
  uint32_t element() const { return bytes_of(spec.type); }
  uint32_t bytes() const { return row_count() * row_bytes(spec.swizzle); }

  /// Elements [first, last) of the row are in bounds; `global` is the address of element 0, in bounds or not.
  struct Row {
    char* global;
    uint32_t first, last;
  };
  Row row(uint32_t r) const {
    const int64_t at_outer[] = {at.y, at.z, at.w};
    int64_t outer[3] = {};  // coordinates of the row
    Row result{nullptr, 0, 0};
    for (int i = 1; i < spec.rank; i++) {
      outer[i - 1] = at_outer[i - 1] + static_cast<int64_t>(r % spec.box[i]);
      r /= spec.box[i];
      if (outer[i - 1] < 0 || outer[i - 1] >= static_cast<int64_t>(spec.size[i])) return result;
    }
    const int64_t width = static_cast<int64_t>(spec.size[0]) - at.x;
    if (width <= 0) return result;
    result.first = at.x < 0 ? static_cast<uint32_t>(std::min<int64_t>(-static_cast<int64_t>(at.x), spec.box[0])) : 0;
    result.last = static_cast<uint32_t>(std::min<int64_t>(width, spec.box[0]));
    // Addresses wrap at 64 bits: only coordinates are checked, so a sum may leave memory and come back
    // (ragged_lines()).
    auto index = static_cast<uint64_t>(static_cast<int64_t>(at.x));
    for (int i = 1; i < spec.rank; i++) index += static_cast<uint64_t>(outer[i - 1]) * spec.stride[i - 1];
    result.global = reinterpret_cast<char*>(reinterpret_cast<uint64_t>(spec.base) + index * element());
    return result;
  }
  /// Offset in shared memory of element e of row r. The pattern follows the address, which starts at kSharedBase.
  uint32_t place(uint32_t r, uint32_t e) const {
    return swizzled(shared + kSharedBase + r * row_bytes(spec.swizzle) + e * element(), spec.swizzle) - kSharedBase;
  }
};

void check_first_column(const BoxCopy& copy) {
  if (copy.at.x * static_cast<int64_t>(copy.element()) % 16 != 0)
    fail(format("x = %d is not at a multiple of 16 bytes", copy.at.x));
}

BoxCopy box_copy(const TensorMap& map, Box at, const Cta& cta, uint32_t address) {
  const BoxCopy copy{map.spec, at, 0};
  const uint32_t pattern = 8 * row_bytes(map.spec.swizzle);
  if (address % pattern != 0)
    fail(format("shared address 0x%x is not at a multiple of %u bytes, where the swizzle pattern starts",
                address & kWindow, pattern));
  check_first_column(copy);
  BoxCopy placed = copy;
  placed.shared = shared_offset(cta, address, copy.bytes());
  return placed;
}

constexpr uintptr_t kUnit = 16;  // alignment of TMA copies in bytes

std::set<uintptr_t>& prefetched_units() {
  static std::set<uintptr_t> units;
  return units;
}

/// TMA reductions flush subnormal fp32 inputs and results to zeros of the same sign.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace

void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier_address, Box at, uint32_t blocks) {
  check_previous_kernel();
  const auto& ctas = current->cta->cluster->ctas;
  if (blocks == 0 || blocks >> ctas.size() != 0)
    fail(format("blocks = 0x%x names CTAs beyond the cluster's %zu", blocks, ctas.size()));
  for (Cta* cta : ctas) {
    if (!(blocks >> cta->rank & 1)) continue;
    if (cta->exited) fail(format("CTA %d, into which this loads, has exited", cta->index));
    const BoxCopy copy = box_copy(map, at, *cta, to);
    Barrier& barrier = barrier_at(*cta, barrier_address, true);
    claim_shared_for_async(*cta, copy.shared, copy.bytes(), Access::of(barrier.actor, barrier.completed + 1));
    for (uint32_t r = 0; r < copy.row_count(); r++) {
      const BoxCopy::Row row = copy.row(r);
      if (row.first >= row.last) continue;
      const char* from = row.global + row.first * copy.element();
      const std::size_t bytes = (row.last - row.first) * copy.element();
      Region& region = global_memory().find(from, bytes);
      const auto offset = static_cast<std::size_t>(from - region.base);
      check_initialised(region, offset, bytes);
      check_async_global_read(region, offset, bytes);
    }
    // NaN until the bytes arrive.
    std::memset(&cta->shared[copy.shared], 0xff, copy.bytes());
    machine->post([cta, copy, barrier_address] {
      if (cta->exited) fail(format("a TMA load arrives in CTA %d, which has exited", cta->index));
      for (uint32_t r = 0; r < copy.row_count(); r++) {
        const BoxCopy::Row row = copy.row(r);
        for (uint32_t e = 0; e < copy.spec.box[0]; e++) {
          uint8_t* to = &cta->shared[copy.place(r, e)];
          if (e >= row.first && e < row.last) {
            std::memcpy(to, row.global + e * copy.element(), copy.element());
          } else {
            std::memset(to, 0, copy.element());
          }
        }
      }
      complete_bytes(*cta, barrier_address, copy.bytes());
    });
  }
}

void tma_prefetch(const TensorMap& map, Box at) {
  check_previous_kernel();
  const BoxCopy copy{map.spec, at, 0};
  check_first_column(copy);
  for (uint32_t r = 0; r < copy.row_count(); r++) {
    const BoxCopy::Row row = copy.row(r);
    if (row.first >= row.last) continue;
    const char* from = row.global + row.first * copy.element();
    const std::size_t bytes = (row.last - row.first) * copy.element();
    global_memory().find(from, bytes);
    for (std::size_t i = 0; i < bytes; i += kUnit)
      prefetched_units().insert(reinterpret_cast<uintptr_t>(from + i) / kUnit);
  }
}

bool prefetched(const void* p, std::size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(p);
  for (uintptr_t unit = first / kUnit; unit <= (first + bytes - 1) / kUnit; unit++) {
    if (!prefetched_units().contains(unit)) return false;
  }
  return true;
}

void forget_prefetched() { prefetched_units().clear(); }

void tma_store(const TensorMap& map, uint32_t from, Box at, bool add) {
  check_previous_kernel();
  Cta& cta = *current->cta;
  if (from >> 24 != static_cast<uint32_t>(cta.rank)) fail("a TMA store reads its own CTA's shared memory");
  if (add && map.spec.type != ElementType::kFloat32) fail("a TMA reduction of other than fp32 is not modelled");
  BulkStores& bulk = current->bulk;
  if (!bulk.used) {
    bulk.used = true;
    bulk.reader = machine->new_actor("a TMA store of " + machine->describe(current->clock.actor));
    bulk.writer = machine->new_actor("a TMA store of " + machine->describe(current->clock.actor));
  }
  const uint32_t group = bulk.committed + 1;
  const BoxCopy copy = box_copy(map, at, cta, from);
  for (uint32_t r = 0; r < copy.row_count(); r++) {
    const BoxCopy::Row row = copy.row(r);
    if (row.first >= row.last) continue;
    if (row.last < copy.spec.box[0] && row.last * copy.element() % 16 != 0)
      fail(
          format("row %d of the tensor ends within 16 bytes of the box: the bytes stored next to them are not modelled",
                 static_cast<int>(at.y) + static_cast<int>(r % copy.spec.box[1])));
    for (uint32_t e = row.first; e < row.last; e++) check_async_read(cta, copy.place(r, e), current->clock);
    char* to = row.global + row.first * copy.element();
    const std::size_t bytes = (row.last - row.first) * copy.element();
    claim_global_for_async(to, bytes, Access::of(bulk.writer, group, add));
  }
  note_async_read(cta, {copy.shared, copy.shared + copy.bytes(), bulk.reader, group});
  Cta* source = &cta;
  bulk.open.push_back(machine->post([source, copy, add] {
    for (uint32_t r = 0; r < copy.row_count(); r++) {
      const BoxCopy::Row row = copy.row(r);
      for (uint32_t e = row.first; e < row.last; e++) {
        const uint8_t* value = &source->shared[copy.place(r, e)];
        char* to = row.global + e * copy.element();
        if (add) {
          float sum, addend;
          std::memcpy(&sum, to, 4);
          std::memcpy(&addend, value, 4);
          sum = flushed(flushed(sum) + flushed(addend));
          std::memcpy(to, &sum, 4);
        } else {
          std::memcpy(to, value, copy.element());
        }
      }
    }
  }));
}

void bulk_commit() {
  BulkStores& bulk = current->bulk;
  bulk.groups.push_back(std::move(bulk.open));
  bulk.open.clear();
  bulk.committed++;
}

void bulk_wait(uint32_t allowed, bool read_only) {
  BulkStores& bulk = current->bulk;
  if (!bulk.open.empty()) fail("bulk stores were issued but not committed, so this wait does not cover them");
  while (bulk.groups.size() > allowed) {
    for (AsyncId id : bulk.groups.front()) machine->force(id);
    bulk.groups.pop_front();
  }
  if (bulk.committed <= allowed) return;
  bulk.known_read = std::max(bulk.known_read, bulk.committed - allowed);
  if (!bulk.used) return;  // only empty groups
  Clock& clock = current->clock;
  clock.acquire(with(nullptr, bulk.reader, bulk.known_read));
  if (read_only) return;
  clock.acquire(with(nullptr, bulk.writer, bulk.committed - allowed));
}

}  // namespace ak::emu
