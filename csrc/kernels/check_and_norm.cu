// check_and_norm: reads every gradient once and answers two questions, is one of them inf or NaN, and how long is their
// vector.
//
// Work: 16-bit gradients cost 2 bytes and a handful of instructions an element, so memory bandwidth is the only limit.
// Plan: a persistent grid of two blocks per SM walks over the chunks of the whole list. A thread adds the squares of
// its share of a chunk in the gradient's precision (at least fp32), and the chunks in double, so that the error of the
// sum is that of a few additions, however long the list. Each block leaves one partial result in its own slot; the
// block that finishes last adds the slots. Traps: the check looks at each *unscaled* element and never at the sum,
// which may overflow on finite gradients. Nothing is added with atomics: their order changes from run to run, and with
// it the last bits of the norm and of every weight after the clip.
#include "kernels/check_and_norm.h"

#include "device/block.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "kernels/tensor_list.h"
#include "kernels/vector_walk.cuh"
#include "math/clip.h"

namespace ak {
namespace {

constexpr int kNormThreads = 256;
constexpr int kNormBlocksPerSm = 2;

/// The per-call scratch: one slot for each block of each launch.
struct NormSlots {
  uint32_t* blocks_done;
  double* sum;
  uint32_t* not_finite;
  int launches;

  static NormSlots in(void* scratch, int slots, int launches) {
    char* base = static_cast<char*>(scratch);
    double* sum = reinterpret_cast<double*>(base + kNormScratchZeroed);
    return {reinterpret_cast<uint32_t*>(base), sum, reinterpret_cast<uint32_t*>(sum + slots), launches};
  }
};

AK_DEVICE double widen(double x) { return x; }
template <class T>
AK_DEVICE float widen(T x) {
  return to_float(x);
}
AK_DEVICE float add_square(float sum, float x) { return fma(x, x, sum); }
AK_DEVICE double add_square(double sum, double x) { return sum + x * x; }

/// This thread's share of the sum of squares of `count` unscaled gradients. Clears `finite` if one of the share is inf
/// or NaN.
template <int kThreads, class T>
AK_DEVICE double sum_squares(const T* grads, int count, float inv_scale, bool& finite) {
  decltype(widen(T{})) sum = 0;
  auto add = [&](T grad) {
    const auto x = unscale(widen(grad), inv_scale);
    finite = finite && is_finite(x);
    sum = add_square(sum, x);
  };

  for_each_vector<kThreads>(grads, count, [&]<int N>(const T*, const Vec<T, N>& v) {
    AK_UNROLL
    for (int j = 0; j < N; j++) add(v[j]);
  });
  return sum;
}

template <int kThreads, class Args>
AK_KERNEL(kThreads, kNormBlocksPerSm)
check_and_norm_kernel(AK_PARAM(Args) args, AK_PARAM(NormSlots) slots, int launch, const float* grad_scale,
                      float* sum_sq, float* found_inf) {
  const float inv_scale = grad_scale == nullptr ? 1.0f : inverse_scale(load(grad_scale));
  double sum = 0;
  bool finite = true;
  int tensor = 0;
  for (uint32_t index = block_index(); index < args.map.chunks; index += grid_blocks()) {
    const TensorChunk chunk = args.map.find(index, tensor);
    tensor = chunk.tensor;
    with_dtype(args.dtype[tensor], [&]<class T>(T) {
      sum +=
          sum_squares<kThreads>(static_cast<const T*>(args.data[tensor]) + chunk.begin, chunk.count, inv_scale, finite);
    });
  }

  sum = block_sum<kThreads>(sum);
  const bool found = block_any(!finite);
  if (thread_index() == 0) {
    const int slot = launch * grid_blocks() + block_index();
    store(slots.sum + slot, sum);
    store(slots.not_finite + slot, found ? 1u : 0u);
  }
  // Launches run one after the other, so the last block of the last launch sees all slots.
  if (launch + 1 < slots.launches || !last_block_done(slots.blocks_done)) return;

  double total = 0;
  bool any = false;
  for (int slot = thread_index(); slot < slots.launches * grid_blocks(); slot += kThreads) {
    total += load(slots.sum + slot);
    any = any || load(slots.not_finite + slot) != 0;
  }
  total = block_sum<kThreads>(total);
  any = block_any(any);
  if (thread_index() == 0) {
    store(sum_sq, static_cast<float>(total));
    store(found_inf, any ? 1.0f : 0.0f);
  }
}

/// The same grid for every launch of a call, so that the slots need no bookkeeping.
template <class Args>
int norm_launches(std::span<const GradRef> grads) {
  return std::max(1, launch_count<Args>(grads));  // even an empty list has an answer
}

}  // namespace

namespace detail {

template <int kThreads, class Args>
Status check_and_norm_on(int blocks, std::span<const GradRef> grads, const float* grad_scale, void* scratch,
                         float* sum_sq, float* found_inf, Stream stream) {
  const int launches = norm_launches<Args>(grads);
  const NormSlots slots = NormSlots::in(scratch, blocks * launches, launches);
  LaunchPlan<Args, GradRef> plan(grads);
  Args args;
  for (int i = 0; i < launches; i++) {
    plan.next(args);
    const LaunchConfig config{.name = "check_and_norm", .grid = blocks, .block = kThreads, .stream = stream};
    const Status status =
        launch(check_and_norm_kernel<kThreads, Args>, config, args, slots, i, grad_scale, sum_sq, found_inf);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

size_t check_and_norm_scratch_bytes(std::span<const GradRef> grads) {
  const size_t slots = static_cast<size_t>(norm_launches<GradListArgs<const void, kGradListTensors>>(grads)) *
                       device_sm_count() * kNormBlocksPerSm;
  return kNormScratchZeroed + slots * (sizeof(double) + sizeof(uint32_t));
}

Status check_and_norm(std::span<const GradRef> grads, const float* grad_scale, void* scratch, float* sum_sq,
                      float* found_inf, Stream stream) {
  return detail::check_and_norm_on<kNormThreads, GradListArgs<const void, kGradListTensors>>(
      device_sm_count() * kNormBlocksPerSm, grads, grad_scale, scratch, sum_sq, found_inf, stream);
}

}  // namespace ak
