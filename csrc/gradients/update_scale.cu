// update_scale_: reads every check's found_inf, moves the loss scale and counts skips, with one warp in one launch.
//
// Work: a few bytes; the launch is the cost. There is one flag per optimizer, so a launch takes few and its arguments
// stay small; a longer list takes a chain of launches, each of which passes on whether it or an earlier one has seen an
// overflow, and only the last one changes the scale. Trap: flags are tested one by one and never added up, where a -1
// or a NaN could hide an overflow.
#include "gradients/call.h"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "gradients/clip.h"

namespace ak {
namespace {

/// The flags of one launch.
template <int N>
struct FlagArgs {
  const float* flags[N];
  int count;
  bool first, last;  // of the chain
};
constexpr int kFlags = 256;

template <int N>
AK_KERNEL(kWarpThreads, 1)
update_scale_kernel(AK_PARAM(FlagArgs<N>) args, AK_PARAM(LossScaleOptions) options, AK_PARAM(LossScaleRef) at,
                    uint32_t* found_before) {
  wait_for_previous_kernel();
  allow_next_kernel();
  bool overflow = false;
  for (int i = thread_index(); i < args.count; i += kWarpThreads) overflow = overflow || found(load(args.flags[i]));
  overflow = warp_any(overflow);
  if (thread_index() != 0) return;
  if (!args.first) overflow = overflow || load(found_before) != 0;
  if (!args.last) {
    store(found_before, overflow ? 1u : 0u);
    return;
  }
  const LossScale before{load(at.scale), load(at.growth_tracker), load(at.hysteresis_tracker)};
  const LossScale after = update_loss_scale(before, overflow, options);
  store(at.scale, after.scale);
  store(at.growth_tracker, after.growth_tracker);
  store(at.hysteresis_tracker, after.hysteresis_tracker);
  if (at.skipped_steps != nullptr) store(at.skipped_steps, count_skips(load(at.skipped_steps), overflow));
  if (at.consecutive_skips != nullptr)
    store(at.consecutive_skips, count_consecutive_skips(load(at.consecutive_skips), overflow));
}

}  // namespace

namespace detail {

template <int N>
Status update_scale_on(const LossScaleRef& scale, std::span<const float* const> found_infs,
                       const LossScaleOptions& options, void* scratch, Stream stream) {
  FlagArgs<N> args;
  size_t begin = 0;
  do {  // even an empty list moves the growth tracker
    const size_t count = std::min<size_t>(N, found_infs.size() - begin);
    std::copy_n(found_infs.begin() + begin, count, args.flags);
    args.count = static_cast<int>(count);
    args.first = begin == 0;
    args.last = begin + count == found_infs.size();
    const LaunchConfig config{
        .name = "update_scale", .grid = 1, .block = kWarpThreads, .overlap_previous = true, .stream = stream};
    const Status status = launch(update_scale_kernel<N>, config, args, options, scale, static_cast<uint32_t*>(scratch));
    if (!status.ok()) return status;
    begin += count;
  } while (begin < found_infs.size());
  return {};
}

}  // namespace detail

size_t update_scale_scratch_bytes(size_t found_infs) { return found_infs > kFlags ? sizeof(uint32_t) : 0; }

Status update_scale(const LossScaleRef& scale, std::span<const float* const> found_infs,
                    const LossScaleOptions& options, void* scratch, Stream stream) {
  return detail::update_scale_on<kFlags>(scale, found_infs, options, scratch, stream);
}

}  // namespace ak
