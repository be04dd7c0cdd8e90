#pragma once
// Shadow memory: the last write and the reads of each granule within one launch. A granule is 2 bytes, or 1 in memory
// whose elements are bytes: accesses to two bytes of one granule by two threads count as a race.
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "emulator/clock.h"

namespace ak::emu {

inline constexpr std::size_t kGranule = 2;  // of shared memory, and of global memory unless its elements are bytes

/// An access: actor and epoch. Actors are stored plus one, so that zero bytes mean no access.
struct Access {
  uint32_t actor_plus_1 = 0;
  Epoch epoch = 0;

  explicit operator bool() const { return actor_plus_1 != 0; }
  Actor actor() const { return (actor_plus_1 & ~kAtomicBit) - 1; }
  bool atomic() const { return actor_plus_1 & kAtomicBit; }
  bool operator==(const Access&) const = default;

  static constexpr uint32_t kAtomicBit = 1u << 31;
  static Access of(Actor actor, Epoch epoch, bool atomic = false) {
    return {(actor + 1) | (atomic ? kAtomicBit : 0u), epoch};
  }
};

class Shadow {
 public:
  explicit Shadow(std::size_t bytes, std::size_t granule = kGranule);

  /// Records a read by `clock`'s thread; returns the earlier write that it races with, if any.
  Access read(std::size_t offset, std::size_t bytes, const Clock& clock);
  struct Conflict {
    Access access;
    bool was_write;
  };
  /// Records a write on behalf of `clock`'s thread as `as` (the thread, or the asynchronous unit that completes the
  /// write); returns the earlier access that it races with, if any.
  Conflict write(std::size_t offset, std::size_t bytes, const Clock& clock, Access as);

  Access last_write(std::size_t offset) const { return cells_[offset / granule_].write; }
  /// Calls `visit(access)` for every recorded read of the granule at `offset`.
  template <class Visit>
  void for_each_read(std::size_t offset, Visit visit) const {
    const Cell& cell = cells_[offset / granule_];
    if (cell.read.actor_plus_1 == kMany) {
      for (Access a : many_[cell.read.epoch].all) visit(a);
    } else if (cell.read) {
      visit(cell.read);
    }
  }
  bool written(std::size_t offset) const { return static_cast<bool>(last_write(offset)); }

 private:
  struct Cell {
    Access write, read;
  };
  static constexpr uint32_t kMany = 0xffffffffu;  // read.epoch is then an index into many_
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  static constexpr std::size_t kFewReads = 16;
  /// Unordered reads of one granule, such as those of a scalar by all threads. Redundant ones are removed when the list
  /// has doubled: a search at every read would be quadratic in the number of threads.
  struct Reads {
    std::vector<Access> all;
    std::size_t limit = kFewReads;
    void add(Access mine, const Clock& clock);
  };

  void note_read(Cell& cell, const Clock& clock);

  std::size_t granule_;
  std::unique_ptr<Cell[], Free> cells_;  // from calloc: untouched pages cost nothing
  std::vector<Reads> many_;
};

}  // namespace ak::emu
