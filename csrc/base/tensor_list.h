// Host side of device/tensor_list.cuh: cuts a list of tensors into launches. Torch-free, needs no GPU.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "device/tensor_list.cuh"

namespace ak {

// Number of launches for a list, with Args::kTensors tensors per launch; empty tensors do not count.
template <class Args, class Entry>
int launch_count(std::span<const Entry> entries) {
  const int64_t places = std::count_if(entries.begin(), entries.end(), [](const Entry& e) { return e.numel > 0; });
  return static_cast<int>((places + Args::kTensors - 1) / Args::kTensors);
}

// Fills the arguments of one launch after the other:
//   LaunchPlan<Args, Entry> plan(entries);
//   while (plan.next(args)) launch(..., args);
// `Entry` has a member `numel`. `Args`, the kernel's arguments, has a ChunkMap `map`, its capacity `kTensors`, and
// `set(place, entry, index of the entry in the list)`, which copies the rest.
template <class Args, class Entry>
class LaunchPlan {
 public:
  explicit LaunchPlan(std::span<const Entry> entries) : entries_(entries) {}

  // Fills `args` for the next launch; false, with an empty map, when nothing is left.
  bool next(Args& args) {
    auto& map = args.map;
    map.tensors = 0;
    map.chunks = 0;
    for (; next_ < entries_.size() && map.tensors < Args::kTensors; next_++) {
      const Entry& entry = entries_[next_];
      if (entry.numel == 0) continue;
      const int place = map.tensors;
      map.numel[place] = entry.numel;
      map.chunks += static_cast<uint32_t>((entry.numel + kChunk - 1) / kChunk);
      map.end[place] = map.chunks;
      map.tensors++;
      args.set(place, entry, next_);
    }
    return map.tensors > 0;
  }

 private:
  std::span<const Entry> entries_;
  size_t next_ = 0;
};

// Largest number of chunks of a launch: the size of scratch per chunk, which consecutive launches reuse.
template <class Args, class Entries>
size_t most_chunks(const Entries& entries) {
  LaunchPlan<Args, typename Entries::value_type> plan(entries);
  Args args;
  uint32_t most = 0;
  while (plan.next(args)) most = std::max(most, args.map.chunks);
  return most;
}

// Blocks of a persistent grid: at most those that run concurrently, and no idle ones.
inline int grid_for(uint32_t chunks, int resident_blocks) {
  return static_cast<int>(std::clamp<uint32_t>(chunks, 1, static_cast<uint32_t>(resident_blocks)));
}

}  // namespace ak
