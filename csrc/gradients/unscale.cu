// unscale_: multiplies every gradient by the inverse loss scale in place, and reports whether one of them is now inf or
// NaN.
//
// Work: 4 bytes (16-bit) to 16 bytes (fp64) an element, read once and written once, and a multiplication, so memory
// bandwidth is the limit. Plan: a persistent grid of five blocks an SM walks over the whole list in
// 16-byte accesses, four of them in flight a thread; each thread tracks whether all its results are finite and reports
// at its end. Traps: the stored value is tested, since a product that fits fp32 may still overflow fp16. The flag is
// shared with other checks, so it is set and never cleared; many threads may set it, each to the same 1.
//
// Without a flag a backward uses it to multiply gradients that its forward has made: by a factor that the host does not
// know and that is 1 in most steps. Every thread then reads the factor and returns.
#include "gradients/list.h"

#include "base/tensor_list.h"
#include "base/vector_walk.cuh"
#include "device/atomic.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"
#include "gradients/clip.h"

namespace ak {
namespace {

constexpr int kUnscaleThreads = 256;
constexpr int kUnscaleBlocksPerSm = 5;  // as many as an SM holds

template <class T>
AK_DEVICE T unscaled(T grad, float inv_scale) {
  return round_to<T>(unscale(to_float(grad), inv_scale));
}
AK_DEVICE double unscaled(double grad, float inv_scale) { return unscale(grad, inv_scale); }

template <int kThreads, class Args>
AK_KERNEL(kThreads, kUnscaleBlocksPerSm)
unscale_kernel(AK_PARAM(Args) args, const float* inv_scale, float* found_inf) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const float factor = load(inv_scale);
  if (found_inf == nullptr && factor == 1.0f) return;
  bool finite = true;
  ListWalk walk(block_index(), grid_blocks());
  for (TensorSpan span; walk.next(args.map, span);) {
    with_dtype(args.dtype[span.tensor], [&]<class T>(T) {
      T* grads = static_cast<T*>(args.data[span.tensor]) + span.begin;
      for_each_vector<kThreads>(grads, span.count, [&]<int N>(T* at, Vec<T, N> v) {
        AK_UNROLL
        for (int j = 0; j < N; j++) {
          v[j] = unscaled(v[j], factor);
          finite = finite && is_finite(v[j]);
        }
        store_vec<Cache::kStreaming>(at, v);
      });
    });
  }
  if (!finite && found_inf != nullptr) store_relaxed(found_inf, 1.0f);
}

}  // namespace

namespace detail {

template <int kThreads, class Args>
Status unscale_on(int resident_blocks, std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale,
                  Stream stream) {
  LaunchPlan<Args, MutableGradRef> plan(grads, resident_blocks);
  Args args;
  while (plan.next(args)) {
    const LaunchConfig config{
        .name = "unscale", .grid = plan.blocks(), .block = kThreads, .overlap_previous = true, .stream = stream};
    const Status status = launch(unscale_kernel<kThreads, Args>, config, args, inv_scale, found_inf);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

Status unscale(std::span<const MutableGradRef> grads, float* found_inf, const float* inv_scale, Stream stream) {
  return with_grad_list(grads, [&]<class Args>() {
    return detail::unscale_on<kUnscaleThreads, Args>(device_sm_count() * kUnscaleBlocksPerSm, grads, found_inf,
                                                     inv_scale, stream);
  });
}

}  // namespace ak
