// cast_: copies a list of tensors into another one, each element widened or rounded to the dtype of its destination.
//
// Work: 4 to 8 bytes an element, read once and written once, and a conversion, so memory bandwidth is the limit. Plan:
// a persistent grid of four blocks an SM walks over the whole list. A thread loads 64 bytes before it
// converts the first: 64 KB in flight an SM. Its elements are Fours (update/elements.cuh), so that every access of a
// warp covers the 32-byte sectors it touches: L2 may evict a sector that is half written, and then reads memory to
// complete it. Each of the nine pairs of dtypes has its own loop. Traps: source and destination have accesses of
// different widths, so peeling cannot align both; a pair that is not aligned to 16 bytes goes element by element.
// Random bits are numbered by element, so both walks draw the same.
#include "cast/call.h"

#include <algorithm>
#include <type_traits>

#include "base/tensor_list.h"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "update/update.cuh"

namespace ak {
namespace {

/// The pairs of one launch.
template <int N>
struct CastListArgs {
  static constexpr int kTensors = N;
  ListMap<N> map;
  void* destination[N];
  const void* source[N];
  uint32_t index[N];  ///< position in the list, part of the key of the random bits
  DType to[N], from[N];

  void set(int place, const CastRef& cast, size_t position) {
    destination[place] = cast.destination;
    source[place] = cast.source;
    index[place] = static_cast<uint32_t>(position);
    to[place] = cast.to;
    from[place] = cast.from;
  }
};
constexpr int kCastListTensors = 928;
static_assert(sizeof(CastListArgs<kCastListTensors>) + 128 <= kArgumentBytes,
              "the list and the other arguments must fit one launch");

constexpr int kCastThreads = 256;
constexpr int kCastBlocksPerSm = 4;
constexpr int kCastBytesInFlight = 64;  // a thread

/// Casts elements [begin, end) with a whole block: one at a time, or, if V is 8 and there are whole warps of them,
/// Fours.
template <int kThreads, int V, class From, class Destination, class Key>
AK_DEVICE void cast_run(const void* source, void* destination, int64_t begin, int64_t end, const Key& key) {
  using At = std::conditional_t<V == 8, Fours, int64_t>;
  constexpr int kLoads = std::min<int>(kCastBytesInFlight / (V * sizeof(From)), 8);
  constexpr int kStride = kThreads * V;
  const From* from = static_cast<const From*>(source);
  const auto convert = [&]<bool kWhole>(std::bool_constant<kWhole>, int64_t i) {
    Vec<From, V> raw[kLoads];
    AK_UNROLL
    for (int k = 0; k < kLoads; k++) {  // beyond the end the first elements are loaded again
      const int64_t at = i + k * kStride;
      raw[k] = load_at<V, At>(from + (kWhole || at < end ? at : i));
    }
    AK_UNROLL
    for (int k = 0; k < kLoads; k++) {
      const int64_t at = i + k * kStride;
      if (!kWhole && at >= end) break;
      float x[V];
      PlainWeight<From>::template decode<V>(raw[k], x);
      Destination::store(destination, nullptr, At{at}, x, key);
    }
  };
  int64_t i = begin + (V == 8 ? Fours::of_thread() : thread_index());
  for (; i + (kLoads - 1) * kStride < end; i += kLoads * kStride) convert(std::true_type{}, i);
  if (i < end) convert(std::false_type{}, i);
}

/// Calls f with a value of the type that `dtype`, not fp64, names.
template <class F>
AK_DEVICE void with_narrow_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(fp16{});
    case DType::kBFloat16:
      return f(bf16{});
    default:
      return f(float{});
  }
}

template <class T, bool kStochastic>
struct Destination : StochasticWeight<T> {};
template <class T>
struct Destination<T, false> : PlainWeight<T> {};
template <>
struct Destination<float, true> : PlainWeight<float> {};

template <int kThreads, bool kStochastic, class Args>
AK_KERNEL(kThreads, kCastBlocksPerSm)
cast_kernel(AK_PARAM(Args) args, uint64_t seed, const float* step) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const uint32_t count = kStochastic && step != nullptr ? static_cast<uint32_t>(load(step)) : 0;
  ListWalk walk(block_index(), grid_blocks());
  for (TensorSpan span; walk.next(args.map, span);) {
    const int tensor = span.tensor;
    const void* source = args.source[tensor];
    void* destination = args.destination[tensor];
    const bool aligned = (reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination)) % 16 == 0;
    const int64_t end = span.begin + span.count;
    const int64_t middle = aligned ? end - span.count % Fours::kWarp : span.begin;
    const RoundingKey<uint64_t> key{seed, count, {0, args.index[tensor], 0, 0, 0}};
    with_narrow_dtype(args.from[tensor], [&]<class From>(From) {
      with_narrow_dtype(args.to[tensor], [&]<class To>(To) {
        cast_run<kThreads, 8, From, Destination<To, kStochastic>>(source, destination, span.begin, middle, key);
        cast_run<kThreads, 1, From, Destination<To, kStochastic>>(source, destination, middle, end, key);
      });
    });
  }
}

}  // namespace

namespace detail {

template <int kThreads, bool kStochastic, class Args>
Status cast_on(int resident_blocks, std::span<const CastRef> casts, uint64_t seed, const float* step, Stream stream) {
  LaunchPlan<Args, CastRef> plan(casts, resident_blocks);
  Args args;
  while (plan.next(args)) {
    const LaunchConfig config{
        .name = "cast", .grid = plan.blocks(), .block = kThreads, .overlap_previous = true, .stream = stream};
    const Status status = launch(cast_kernel<kThreads, kStochastic, Args>, config, args, seed, step);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

Status cast(std::span<const CastRef> casts, std::optional<uint64_t> seed, const float* step, Stream stream) {
  const int blocks = device_sm_count() * kCastBlocksPerSm;
  using Args = CastListArgs<kCastListTensors>;
  if (seed) return detail::cast_on<kCastThreads, true, Args>(blocks, casts, *seed, step, stream);
  return detail::cast_on<kCastThreads, false, Args>(blocks, casts, 0, nullptr, stream);
}

}  // namespace ak
