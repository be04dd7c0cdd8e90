// judge_units_: decides about every unit of an optimizer, with one warp a unit.
//
// Work: 8 bytes a tensor and some 150 a unit; the launch is the cost. The order of additions depends on the list alone.
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "gradients/call.h"
#include "gradients/judge.h"

namespace ak {
namespace {

constexpr int kJudgeThreads = 128;

/// A struct of doubles, of any number.
template <class T>
AK_DEVICE T load_numbers(const T* p) {
  T value;
  AK_UNROLL
  for (size_t i = 0; i < sizeof(T) / sizeof(double); i++) {
    reinterpret_cast<double*>(&value)[i] = load(reinterpret_cast<const double*>(p) + i);
  }
  return value;
}
template <class T>
AK_DEVICE void store_numbers(T* p, const T& value) {
  AK_UNROLL
  for (size_t i = 0; i < sizeof(T) / sizeof(double); i++) {
    store(reinterpret_cast<double*>(p) + i, reinterpret_cast<const double*>(&value)[i]);
  }
}

template <int kThreads>
AK_KERNEL(kThreads, 1)
judge_units_kernel(AK_PARAM(UnitsRef) at) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t unit = static_cast<int64_t>(block_index()) * (kThreads / kWarpThreads) + warp_index();
  if (unit >= at.units) return;
  const int64_t first = unit == 0 ? 0 : load(at.ends + unit - 1), last = load(at.ends + unit);
  const int64_t begin = first < 0 ? 0 : first, end = last > at.tensors ? at.tensors : last;
  UnitTotal total;
  for (int64_t i = begin + lane_index(); i < end; i += kWarpThreads) {
    const int64_t entry = load(at.rows + i), row = row_of(entry);
    if (row < at.tensors) total.add(entry, load(at.sums + row), load(at.flags + row));
  }
  total.sum = warp_sum(total.sum);
  total.there = warp_any(total.there);
  total.nonfinite = warp_any(total.nonfinite);
  float factor = kLeave;
  if (lane_index() == 0) {
    const bool found_before = at.found_infs != nullptr && found(load(at.found_infs + unit));
    UnitStatistics statistics = load_numbers(at.statistics + unit);
    const UnitResult result = total.judge(statistics, found_before, load_numbers(at.rules + unit));
    store_numbers(at.statistics + unit, statistics);
    store(at.results + unit, result.norm);
    store(at.results + at.units + unit, result.skipped ? 1.0f : 0.0f);
    store(at.results + 2 * at.units + unit, result.nonfinite ? 1.0f : 0.0f);
    factor = result.factor;
  }
  factor = shuffle(factor, 0);
  for (int64_t i = begin + lane_index(); i < end; i += kWarpThreads) {
    const int64_t row = row_of(load(at.rows + i));
    if (row < at.tensors) store(at.factors + row, factor);
  }
}

}  // namespace

namespace detail {

template <int kThreads>
Status judge_units_on(const UnitsRef& at, Stream stream) {
  constexpr int kWarps = kThreads / kWarpThreads;
  const LaunchConfig config{.name = "judge_units",
                            .grid = static_cast<int>((at.units + kWarps - 1) / kWarps),
                            .block = kThreads,
                            .overlap_previous = true,
                            .stream = stream};
  return launch(judge_units_kernel<kThreads>, config, at);
}

}  // namespace detail

Status judge_units(const UnitsRef& at, Stream stream) { return detail::judge_units_on<kJudgeThreads>(at, stream); }

}  // namespace ak
