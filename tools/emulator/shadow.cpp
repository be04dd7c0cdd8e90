#include "emulator/shadow.h"

#include <algorithm>
#include <new>

namespace ak::emu {

Shadow::Shadow(std::size_t bytes, std::size_t granule)
    : granule_(granule), cells_(static_cast<Cell*>(std::calloc(bytes / granule + 1, sizeof(Cell)))) {
  if (!cells_) throw std::bad_alloc();
}

void Shadow::note_read(Cell& cell, const Clock& clock) {
  const Access mine = Access::of(clock.actor, clock.now);
  if (cell.read == mine) return;
  // An earlier read that happens before this one is redundant: accesses ordered after this one are ordered after both.
  const bool many = cell.read.actor_plus_1 == kMany;
  if (!many && (!cell.read || clock.knows(cell.read.actor(), cell.read.epoch))) {
    cell.read = mine;
    return;
  }
  if (!many) {
    many_.push_back({{cell.read}});
    cell.read = {kMany, static_cast<Epoch>(many_.size() - 1)};
  }
  many_[cell.read.epoch].add(mine, clock);
}

void Shadow::Reads::add(Access mine, const Clock& clock) {
  if (clock.knows(all.back().actor(), all.back().epoch)) {
    all.back() = mine;
    return;
  }
  all.push_back(mine);
  if (all.size() < limit) return;
  std::sort(all.begin(), all.end(), [](Access a, Access b) {
    return a.actor_plus_1 != b.actor_plus_1 ? a.actor_plus_1 < b.actor_plus_1 : a.epoch > b.epoch;
  });
  const auto same_actor = [](Access a, Access b) { return a.actor_plus_1 == b.actor_plus_1; };
  all.erase(std::unique(all.begin(), all.end(), same_actor), all.end());
  std::erase_if(all, [&](Access a) { return a != mine && clock.knows(a.actor(), a.epoch); });
  limit = 2 * all.size() + kFewReads;
}

Access Shadow::read(std::size_t offset, std::size_t bytes, const Clock& clock) {
  const std::size_t end = (offset + bytes + granule_ - 1) / granule_;
  for (std::size_t i = offset / granule_; i < end; i++) {
    Cell& cell = cells_[i];
    if (cell.write && !clock.knows(cell.write.actor(), cell.write.epoch)) return cell.write;
    note_read(cell, clock);
  }
  return {};
}

Shadow::Conflict Shadow::write(std::size_t offset, std::size_t bytes, const Clock& clock, Access as) {
  const std::size_t end = (offset + bytes + granule_ - 1) / granule_;
  for (std::size_t i = offset / granule_; i < end; i++) {
    Cell& cell = cells_[i];
    const bool both_atomic = as.atomic() && cell.write.atomic();
    if (cell.write && !both_atomic && !clock.knows(cell.write.actor(), cell.write.epoch)) return {cell.write, true};
    Access racing{};
    for_each_read(i * granule_, [&](Access a) {
      if (!clock.knows(a.actor(), a.epoch)) racing = a;
    });
    if (racing) return {racing, false};
    cell.write = as;
    if (cell.read.actor_plus_1 == kMany) many_[cell.read.epoch] = {};
    cell.read = {};
  }
  return {{}, false};
}

}  // namespace ak::emu
