// check_and_norm: reads every gradient once and answers two questions: is one of them inf or NaN, and what is the norm,
// of the whole list or of each tensor.
//
// Work: 16-bit gradients cost 2 bytes and a handful of instructions an element, so memory bandwidth is the only limit.
// Plan: a persistent grid of the three blocks that an SM holds walks over the whole list. A thread has eight loads of
// 16 bytes in flight, its whole share of a span of 16-bit elements: at most 96 KB an SM. By Little's law an H200 needs
// some 40 KB (36 bytes a nanosecond and SM, a microsecond away). A thread keeps two numbers: the sum of squares, and
// the peak (gradients/grad_norm.h), which is the largest magnitude and the check in one. Within a span it adds squares
// in the gradient's precision (at least fp32), across spans in double, so that the error of the sum is that of a few
// additions, however long the list. Each block leaves a partial result in its slot; the block that finishes last
// reduces the slots.
//
// Per tensor: block b of a grid of G blocks takes the runs b, b + G, b + 2G, ..., so it meets its spans of a tensor one
// right after the other. When it moves on to another tensor, it leaves a partial result in the slot of the first span
// that it had of the last one. A tensor has a slot for each run that reaches into it, side by side, and the first G of
// them are used: at most 12 bytes written and read for a run of 32 KB, and no counters. A second, small kernel reduces
// them, one warp a tensor.
//
// Traps: the check looks at each *unscaled* element and never at the sum, which may overflow on finite gradients. No
// sum uses atomics: their order changes from run to run, and with it the last bits of the norm and of every weight
// after the clip. Squares of values below 2^-63 lose bits in fp32, below 2^-75 they vanish. Products in double would
// cure that, but a conversion and an fma in double per element run at 2 a cycle and SM on chips with few such units
// (compute capability 7.5, 8.6, 8.9, 12.0), slower than memory delivers 16-bit gradients. So a thread whose share of a
// span has a small sum reads this share once more, multiplied by a power of two: the loop is the same and the bytes
// are in L2. Shares that are all zero, the frequent small ones, are recognized by their peak.
#include "gradients/list.h"

#include "base/tensor_list.h"
#include "base/vector_walk.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "gradients/clip.h"

namespace ak {
namespace {

constexpr int kNormThreads = 256;
constexpr int kNormBlocksPerSm = 3;  // as many as an SM holds
constexpr int kNormLoads = 8;        // of 16 bytes, in flight a thread

AK_DEVICE double widen(double x) { return x; }
template <class T>
AK_DEVICE float widen(T x) {
  return to_float(x);
}
AK_DEVICE float add_square(float sum, float x) { return fma(x, x, sum); }
AK_DEVICE double add_square(double sum, double x) { return sum + x * x; }
struct Larger {
  template <class T>
  AK_DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

/// The result for some of the elements, kept by a thread or a block.
struct Found {
  double sum = 0;  ///< of squares
  uint32_t peak = 0;
};

/// Adds this thread's share of the `count` gradients of a span to `found`.
template <int kThreads, class T>
AK_DEVICE void add_share(const T* grads, int count, float inv_scale, Found& found) {
  float factor = inv_scale;
  bool lifted = false;
  while (true) {
    decltype(widen(T{})) sum = 0;
    decltype(magnitude_bits(sum)) largest = 0;
    for_each_vector<kThreads, Cache::kStreaming, kNormLoads>(grads, count, [&]<int N>(const T*, const Vec<T, N>& v) {
      AK_UNROLL
      for (int j = 0; j < N; j++) {
        const auto x = unscale(widen(v[j]), factor);
        largest = Larger{}(largest, magnitude_bits(x));
        sum = add_square(sum, x);
      }
    });
    if (lifted) {
      found.sum += static_cast<double>(sum) * kUnlift;
      return;
    }
    found.peak = Larger{}(found.peak, peak_of(largest));
    lifted = sizeof(sum) == sizeof(float) && sum < kSmallSum && largest != 0;
    if (!lifted) {
      found.sum += sum;
      return;
    }
    factor = inv_scale * kLift;
  }
}

template <int kThreads, class Args>
AK_DEVICE void add_span(const Args& args, const TensorSpan& span, float inv_scale, Found& found) {
  with_dtype(args.dtype[span.tensor], [&]<class T>(T) {
    const T* grads = static_cast<const T*>(args.data[span.tensor]) + span.begin;
    add_share<kThreads>(grads, span.count, inv_scale, found);
  });
}

/// The result of all threads of the block.
template <int kThreads>
AK_DEVICE Found block_total(Found found) {
  return {block_sum<kThreads>(found.sum), block_reduce<kThreads>(found.peak, Larger{})};
}

AK_DEVICE float load_inverse_scale(const float* grad_scale) {
  return grad_scale == nullptr ? 1.0f : inverse_scale(load(grad_scale));
}

/// The partial results.
struct NormSlots {
  double* sum;
  uint32_t* peak;

  static NormSlots in(void* scratch, size_t slots) {
    double* sum = static_cast<double*>(scratch);
    return {sum, reinterpret_cast<uint32_t*>(sum + slots)};
  }
  static constexpr size_t kBytes = sizeof(double) + sizeof(uint32_t);
};
AK_DEVICE void store_slot(const NormSlots& slots, uint32_t slot, const Found& found) {
  store(slots.sum + slot, found.sum);
  store(slots.peak + slot, found.peak);
}
AK_DEVICE void add_slot(Found& found, const NormSlots& slots, uint32_t slot) {
  found.sum += load(slots.sum + slot);
  found.peak = Larger{}(found.peak, load(slots.peak + slot));
}

/// The destinations of the results.
struct NormResults {
  float* norm;
  float* found_inf;
  Norm kind;
};
AK_DEVICE void store_result(const NormResults& results, int position, const Found& found) {
  const bool largest = results.kind == Norm::kLargest;
  store(results.norm + position, largest ? peak_value(found.peak) : static_cast<float>(found.sum));
  store(results.found_inf + position, peak_is_finite(found.peak) ? 0.0f : 1.0f);
}

// ---- the whole list ----

/// One of the launches of a list, and the counter that their blocks share.
struct NormLaunch {
  int first_slot;
  bool last;
  uint32_t* blocks_done;
};

template <int kThreads, class Args>
AK_KERNEL(kThreads, kNormBlocksPerSm)
check_and_norm_kernel(AK_PARAM(Args) args, AK_PARAM(NormSlots) slots, AK_PARAM(NormLaunch) launch,
                      const float* grad_scale, AK_PARAM(NormResults) results) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const float inv_scale = load_inverse_scale(grad_scale);
  Found found;
  ListWalk walk(block_index(), grid_blocks());
  for (TensorSpan span; walk.next(args.map, span);) {
    add_span<kThreads>(args, span, inv_scale, found);
  }

  found = block_total<kThreads>(found);
  if (thread_index() == 0) store_slot(slots, launch.first_slot + block_index(), found);
  // Launches run one after the other, so the last block of the last launch sees all slots.
  if (!launch.last || !last_block_done(launch.blocks_done)) return;

  Found total;
  const int count = launch.first_slot + grid_blocks();
  AK_NO_UNROLL
  for (int slot = thread_index(); slot < count; slot += kThreads) add_slot(total, slots, slot);
  total = block_total<kThreads>(total);
  if (thread_index() == 0) store_result(results, 0, total);
}

template <class Args>
int norm_launches(std::span<const GradRef> grads) {
  return std::max(1, launch_count<Args>(grads));  // even an empty list has an answer
}

// ---- each tensor ----

/// The slot of a run's span of a tensor: one span begins with each run but the first, and one with each tensor.
AK_HD uint32_t slot_of(uint32_t run, int tensor) { return run + static_cast<uint32_t>(tensor); }
template <class Map>
size_t per_tensor_slots(const Map& map) {
  return map.runs + static_cast<size_t>(map.tensors);
}

template <int kThreads, class Args>
AK_KERNEL(kThreads, kNormBlocksPerSm)
per_tensor_norm_kernel(AK_PARAM(Args) args, AK_PARAM(NormSlots) slots, const float* grad_scale) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const float inv_scale = load_inverse_scale(grad_scale);
  ListWalk walk(block_index(), grid_blocks());
  TensorSpan span;
  for (bool more = walk.next(args.map, span); more;) {
    const int tensor = span.tensor;
    const uint32_t slot = slot_of(walk.run(), tensor);
    Found found;
    do {
      add_span<kThreads>(args, span, inv_scale, found);
      more = walk.next(args.map, span);
    } while (more && span.tensor == tensor);
    found = block_total<kThreads>(found);
    if (thread_index() == 0) store_slot(slots, slot, found);
  }
}

/// One warp a tensor. `blocks`: the grid size of the kernel that left the partial results.
template <int kThreads, class Args>
AK_KERNEL(kThreads, 1)
per_tensor_finish_kernel(AK_PARAM(Args) args, AK_PARAM(NormSlots) slots, int blocks, AK_PARAM(NormResults) results) {
  constexpr int kWarps = kThreads / kWarpThreads;
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int tensor = block_index() * kWarps + warp_index(); tensor < args.map.tensors;
       tensor += grid_blocks() * kWarps) {
    const uint32_t first_run = args.map.run_of(args.map.begin_of(tensor));
    const uint32_t runs = args.map.run_of(args.map.end[tensor] - 1) - first_run + 1;
    const uint32_t count = runs < static_cast<uint32_t>(blocks) ? runs : static_cast<uint32_t>(blocks);
    const uint32_t begin = slot_of(first_run, tensor);
    Found found;
    for (uint32_t slot = lane_index(); slot < count; slot += kWarpThreads) add_slot(found, slots, begin + slot);
    found = {warp_sum(found.sum), warp_reduce(found.peak, Larger{})};
    if (lane_index() == 0) store_result(results, args.position[tensor], found);
  }
}

}  // namespace

namespace detail {

template <int kThreads, class Args>
Status check_and_norm_on(int resident_blocks, std::span<const GradRef> grads, const float* grad_scale, Norm norm,
                         void* scratch, uint32_t* blocks_done, float* result, float* found_inf, Stream stream) {
  const int launches = norm_launches<Args>(grads);
  const NormSlots slots = NormSlots::in(scratch, static_cast<size_t>(resident_blocks) * launches);
  const NormResults results{result, found_inf, norm};
  LaunchPlan<Args, GradRef> plan(grads, resident_blocks);
  Args args;
  int first_slot = 0;
  for (int i = 0; i < launches; i++) {
    plan.next(args);
    const NormLaunch of_list{first_slot, i + 1 == launches, blocks_done};
    const LaunchConfig config{
        .name = "check_and_norm", .grid = plan.blocks(), .block = kThreads, .overlap_previous = true, .stream = stream};
    const Status status =
        launch(check_and_norm_kernel<kThreads, Args>, config, args, slots, of_list, grad_scale, results);
    if (!status.ok()) return status;
    first_slot += plan.blocks();
  }
  return {};
}

template <int kThreads, class Args>
Status check_and_norm_per_tensor_on(int resident_blocks, std::span<const GradRef> grads, const float* grad_scale,
                                    Norm norm, void* scratch, float* results, float* found_infs, Stream stream) {
  constexpr int kWarps = kThreads / kWarpThreads;
  LaunchPlan<Args, GradRef> plan(grads, resident_blocks);
  const NormSlots slots = NormSlots::in(scratch, most_of(plan, per_tensor_slots<decltype(Args::map)>));
  Args args;
  while (plan.next(args)) {
    const int blocks = plan.blocks();
    LaunchConfig config{.name = "check_and_norm (per tensor)",
                        .grid = blocks,
                        .block = kThreads,
                        .overlap_previous = true,
                        .stream = stream};
    Status status = launch(per_tensor_norm_kernel<kThreads, Args>, config, args, slots, grad_scale);
    if (!status.ok()) return status;
    config.name = "check_and_norm (per tensor, end)";
    config.grid = std::min((args.map.tensors + kWarps - 1) / kWarps, resident_blocks);
    const NormResults to{results, found_infs, norm};
    status = launch(per_tensor_finish_kernel<kThreads, Args>, config, args, slots, blocks, to);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

size_t check_and_norm_scratch_bytes(std::span<const GradRef> grads) {
  const size_t slots = static_cast<size_t>(norm_launches<GradListArgs<const void, kGradListTensors>>(grads)) *
                       device_sm_count() * kNormBlocksPerSm;
  return slots * NormSlots::kBytes;
}

size_t check_and_norm_per_tensor_scratch_bytes(std::span<const GradRef> grads) {
  using Args = PlacedGradListArgs<const void, kPlacedGradListTensors>;
  const LaunchPlan<Args, GradRef> plan(grads, device_sm_count() * kNormBlocksPerSm);
  return most_of(plan, per_tensor_slots<decltype(Args::map)>) * NormSlots::kBytes;
}

Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                      uint32_t* blocks_done, float* result, float* found_inf, Stream stream) {
  return with_grad_list(grads, [&]<class Args>() {
    return detail::check_and_norm_on<kNormThreads, Args>(device_sm_count() * kNormBlocksPerSm, grads, grad_scale, norm,
                                                         scratch, blocks_done, result, found_inf, stream);
  });
}

Status check_and_norm_per_tensor(std::span<const GradRef> grads, const float* grad_scale, Norm norm, void* scratch,
                                 float* results, float* found_infs, Stream stream) {
  return detail::check_and_norm_per_tensor_on<kNormThreads, PlacedGradListArgs<const void, kPlacedGradListTensors>>(
      device_sm_count() * kNormBlocksPerSm, grads, grad_scale, norm, scratch, results, found_infs, stream);
}

}  // namespace ak
