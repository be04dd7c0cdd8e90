// exponent_histogram: counts for each tensor how many of its values are in each power of two, and how many are zero,
// infinite or NaN.
//
// Work: 2 bytes (16-bit) or 4 (fp32) an element, read once, a few integer instructions for its bin, and one increment
// of a counter in shared memory. Plan: a persistent grid of five blocks an SM walks over the whole list in 16-byte
// accesses. A block meets its elements of a tensor one right after the other: it counts them in shared memory, and then
// adds its counters to the tensor's. Counts are integers, so the order of the atomics does not show in the result.
//
// Traps: values of a tensor share a dozen exponents, so most threads of a warp increment the same counter. An increment
// by one whose old value is unused compiles to an instruction of its own (ATOMS.POPC.INC), which adds up the threads of
// a warp that hit one address. A block's counters are 32 bits wide: enough for 2^32 elements of a tensor a block, more
// than a GPU holds.
#include "gradients/list.h"

#include "base/tensor_list.h"
#include "base/vector_walk.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "gradients/exponent.h"
#include "gradients/grad_norm.h"

namespace ak {
namespace {

constexpr int kHistogramThreads = 256;
constexpr int kHistogramBlocksPerSm = 5;  // as many as an SM holds

AK_DEVICE float narrowed(double x) { return static_cast<float>(x); }
template <class T>
AK_DEVICE float narrowed(T x) {
  return to_float(x);
}

struct BinCounters;

template <int kThreads, class Args>
AK_KERNEL(kThreads, kHistogramBlocksPerSm)
exponent_histogram_kernel(AK_PARAM(Args) args, uint64_t* counts, uint32_t* largest) {
  wait_for_previous_kernel();
  allow_next_kernel();
  auto counters = shared<uint32_t, kExponentBins, BinCounters>();
  ListWalk walk(block_index(), grid_blocks());
  TensorSpan span;
  for (bool more = walk.next(args.map, span); more;) {
    const int tensor = span.tensor;
    for (int bin = thread_index(); bin < kExponentBins; bin += kThreads) counters[bin] = 0u;
    block_sync();

    uint32_t most = 0;
    do {
      with_dtype(args.dtype[tensor], [&]<class T>(T) {
        const T* values = static_cast<const T*>(args.data[tensor]) + span.begin;
        for_each_vector<kThreads>(values, span.count, [&]<int N>(const T*, const Vec<T, N>& v) {
          AK_UNROLL
          for (int j = 0; j < N; j++) {
            const uint32_t magnitude = magnitude_bits(narrowed(v[j]));
            const uint32_t bin = exponent_bin(magnitude);
            atomic_add(counters + static_cast<int>(bin), 1u);
            if (bin < static_cast<uint32_t>(kInfinityBin) && magnitude > most) most = magnitude;
          }
        });
      });
      more = walk.next(args.map, span);
    } while (more && span.tensor == tensor);

    block_sync();
    const int64_t position = args.position[tensor];
    for (int bin = thread_index(); bin < kExponentBins; bin += kThreads) {
      const uint32_t count = counters[bin];
      if (count != 0) atomic_add(counts + position * kExponentBins + bin, static_cast<uint64_t>(count));
    }
    // Its barriers also stand between this tensor's counters and the next one's.
    most = block_reduce<kThreads>(most, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
    if (thread_index() == 0) atomic_max(largest + position, most);
  }
}

}  // namespace

namespace detail {

template <int kThreads, class Args>
Status exponent_histogram_on(int resident_blocks, std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest,
                             Stream stream) {
  LaunchPlan<Args, GradRef> plan(tensors, resident_blocks);
  Args args;
  while (plan.next(args)) {
    const LaunchConfig config{.name = "exponent_histogram",
                              .grid = plan.blocks(),
                              .block = kThreads,
                              .overlap_previous = true,
                              .stream = stream};
    const Status status = launch(exponent_histogram_kernel<kThreads, Args>, config, args, counts, largest);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

Status exponent_histogram(std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest, Stream stream) {
  return detail::exponent_histogram_on<kHistogramThreads, PlacedGradListArgs<const void, kPlacedGradListTensors>>(
      device_sm_count() * kHistogramBlocksPerSm, tensors, counts, largest, stream);
}

}  // namespace ak
