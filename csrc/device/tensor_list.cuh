// A list of tensors in the kernel arguments, and the share of each block in it.
//
// A launch over hundreds of tensors needs their addresses. As kernel arguments they cost a few microseconds of host
// time, but no table on the device, no upload and no stale copies, and a CUDA graph keeps its own copy. Every tensor is
// cut into units of elements, which are numbered over the whole list. Consecutive units form runs of almost equal
// length; block b of G takes the runs b, b + G, b + 2G, ..., and each block gets as many. So small and large tensors,
// dtypes and parameter groups share one launch, and the loads of any two blocks differ by one unit at most. A block
// finds the tensor of a run by binary search in the prefix sums.
#pragma once
#include <cstdint>

#include "base/config.h"
#include "base/dtype.h"

namespace ak {

#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
#error "amp_kernels needs CUDA 12.1 or newer: before it, a launch takes 4,096 bytes of arguments"
#endif
/// Maximum bytes of kernel arguments (compute capability 7.0 and newer, CUDA 12.1 and newer).
inline constexpr int kArgumentBytes = 32764;
/// Bytes of arguments for short lists, since each launch copies its arguments; also the limit of older drivers.
inline constexpr int kFewArgumentBytes = 4096;

/// Elements per unit: half of those that 256 threads load at once, eight each. A multiple of 16, so that units of an
/// aligned tensor are aligned.
inline constexpr int kUnit = 1024;
/// Units per run at most: enough to hide the search for its tensor. Neighbours stay near each other in memory.
inline constexpr int kRunUnits = 16;

/// Consecutive elements of a tensor.
struct TensorSpan {
  int tensor;     ///< position in the launch's list
  int64_t begin;  ///< first element
  int count;      ///< elements, at least 1
};

/// Sizes of up to N tensors, none of them empty, and the runs.
template <int N>
struct ListMap {
  int tensors;
  int unit;                  ///< elements
  uint32_t units;            ///< of all tensors
  uint32_t runs;             ///< a multiple of the number of blocks
  uint32_t per_run, longer;  ///< the first `longer` runs have per_run + 1 units, the others per_run
  uint32_t end[N];           ///< prefix sums: tensor i owns the units [end[i - 1], end[i])
  int64_t numel[N];

  AK_HD uint32_t begin_of(int tensor) const { return tensor == 0 ? 0 : end[tensor - 1]; }
  /// The first unit of a run; `runs` is allowed.
  AK_HD uint32_t first_unit(uint32_t run) const { return run * per_run + (run < longer ? run : longer); }
  AK_HD uint32_t run_of(uint32_t index) const {
    const uint32_t of_longer = longer * (per_run + 1);
    return index < of_longer ? index / (per_run + 1) : longer + (index - of_longer) / per_run;
  }

  /// The units [index, stop), or as many of them as belong to one tensor. `hint` is a tensor at or before the result,
  /// such as that of the block's previous span, which in large tensors is mostly the same.
  AK_HD TensorSpan find(uint32_t index, uint32_t stop, int hint) const {
    int low = hint, high = tensors - 1;
    if (index < end[low]) high = low;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (index < end[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t begin = static_cast<int64_t>(index - begin_of(low)) * unit;
    const int64_t wanted = static_cast<int64_t>(stop - index) * unit, left = numel[low] - begin;
    return {low, begin, static_cast<int>(left < wanted ? left : wanted)};
  }
};

/// The share of block `block` of `blocks`, span by span:
///   ListWalk walk{block_index(), grid_blocks()};
///   for (TensorSpan span; walk.next(args.map, span);) ...
class ListWalk {
 public:
  AK_HD ListWalk(uint32_t block, uint32_t blocks) : run_(block - blocks), blocks_(blocks) {}

  /// The run of the last span.
  AK_HD uint32_t run() const { return run_; }

  template <int N>
  AK_HD bool next(const ListMap<N>& map, TensorSpan& span) {
    if (at_ == stop_) {
      run_ += blocks_;
      if (run_ >= map.runs) return false;
      at_ = map.first_unit(run_);
      stop_ = map.first_unit(run_ + 1);
    }
    span = map.find(at_, stop_, tensor_);
    tensor_ = span.tensor;
    const uint32_t end = map.end[tensor_];
    at_ = end < stop_ ? end : stop_;
    return true;
  }

 private:
  uint32_t run_, blocks_;  // run_ wraps around before the first span
  uint32_t at_ = 0, stop_ = 0;
  int tensor_ = 0;
};

}  // namespace ak
