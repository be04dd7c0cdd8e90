// Host side of device/tensor_list.cuh: cuts a list of tensors into launches. Torch-free, needs no GPU.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "device/tensor_list.cuh"

namespace ak {

// True for the entries of a list that its launches take: those that are not empty and, if Args has takes(entry), for
// which that is true.
template <class Args, class Entry>
bool takes(const Entry& entry) {
  if constexpr (requires { Args::takes(entry); }) {
    return entry.numel > 0 && Args::takes(entry);
  } else {
    return entry.numel > 0;
  }
}

// Number of launches for a list, with Args::kTensors tensors per launch.
template <class Args, class Entry>
int launch_count(std::span<const Entry> entries) {
  const int64_t places = std::count_if(entries.begin(), entries.end(), takes<Args, Entry>);
  return static_cast<int>((places + Args::kTensors - 1) / Args::kTensors);
}

// Shares the units of a launch out among at most `resident_blocks` blocks, those that run concurrently; returns the
// number of blocks, none of them idle, at least 1.
template <int N>
int share_out(ListMap<N>& map, int resident_blocks) {
  const auto divide_up = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
  const uint32_t per_block = std::max(1u, divide_up(map.units, static_cast<uint32_t>(resident_blocks)));
  const uint32_t blocks = divide_up(map.units, per_block);
  map.runs = blocks * divide_up(per_block, kRunUnits);
  map.per_run = map.runs == 0 ? 0 : map.units / map.runs;
  map.longer = map.units - map.runs * map.per_run;
  return static_cast<int>(std::max(1u, blocks));
}

// Fills the arguments of one launch after the other:
//   LaunchPlan<Args, Entry> plan(entries, resident_blocks);
//   while (plan.next(args)) launch(..., plan.blocks(), args);
// `Entry` has a member `numel`. `Args`, the kernel's arguments, has a ListMap `map`, its capacity `kTensors`, and
// `set(place, entry, index of the entry in the list)`, which copies the rest.
template <class Args, class Entry>
class LaunchPlan {
 public:
  LaunchPlan(std::span<const Entry> entries, int resident_blocks, int unit = kUnit)
      : entries_(entries), resident_blocks_(resident_blocks), unit_(unit) {}

  // Fills `args` for the next launch; false, with an empty map, when nothing is left.
  bool next(Args& args) {
    auto& map = args.map;
    map.tensors = 0;
    map.unit = unit_;
    map.units = 0;
    for (; next_ < entries_.size() && map.tensors < Args::kTensors; next_++) {
      const Entry& entry = entries_[next_];
      if (!takes<Args>(entry)) continue;
      const int place = map.tensors;
      map.numel[place] = entry.numel;
      map.units += static_cast<uint32_t>((entry.numel + unit_ - 1) / unit_);
      map.end[place] = map.units;
      map.tensors++;
      args.set(place, entry, next_);
    }
    blocks_ = share_out(map, resident_blocks_);
    return map.tensors > 0;
  }

  // The grid of the launch.
  int blocks() const { return blocks_; }

 private:
  std::span<const Entry> entries_;
  int resident_blocks_, unit_, blocks_ = 1;
  size_t next_ = 0;
};

// The largest of count(map) over the launches of a plan: the size of scratch that consecutive launches reuse.
template <class Args, class Entry, class Count>
size_t most_of(LaunchPlan<Args, Entry> plan, Count count) {
  Args args;
  size_t most = 0;
  while (plan.next(args)) most = std::max(most, static_cast<size_t>(count(args.map)));
  return most;
}

}  // namespace ak
