// Every entry of csrc/device once, for ptxas: test_vocabulary.py compiles this file, nothing runs it. The
// emulator tests the results of an entry; here ptxas only has to accept its PTX.
#include "device/approx.cuh"
#include "device/async_copy.cuh"
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/registers.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

namespace ak {

template <class T>
AK_DEVICE void use_memory(const T* from, T* to) {
  store(to, load(from));
  store<Cache::kStreaming>(to + 1, load<Cache::kStreaming>(from + 1));
  constexpr int kWide = 16 / sizeof(T);
  store_vec(to, load_vec<kWide>(from));
  store_vec<Cache::kStreaming>(to + 64, load_vec<2 * kWide, Cache::kStreaming>(from));
}

/// For every architecture of the package.
AK_KERNEL(128, 1)
all_chips_kernel(const float* f, const fp16* h, const double* d, float* f_out, fp16* h_out, double* d_out,
                 uint32_t* counter) {
  use_memory(f, f_out);
  use_memory(h, h_out);
  use_memory(d, d_out);
  auto values = shared<float, 128>();
  values[thread_index()] = warp_sum(load(f + thread_index()));
  warp_sync();
  named_barrier(1, 128);
  if (warp_index() < 2) {
    named_barrier_arrive(2, 128);
  } else {
    named_barrier(2, 128);
  }
  const bool any = warp_any(values[lane_index()] > 0) || ballot(true) == 0;
  atomic_add(f_out, shuffle(block_sum<128>(any ? 1.0f : 2.0f), 3));
  store_relaxed(f_out, exp2_approx(1.0f) + reciprocal_approx(values[3]) + rsqrt_approx(values[4]));
  if (opaque(static_cast<int>(values[2])) == 1 && opaque(counter) != nullptr && last_block_done(counter))
    store(counter + 1, atomic_add(counter, 1u));
  atomic_max(counter, 1u);
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_shared());
  ldmatrix_x4(r, dynamic_shared(), any);
  store(f_out + thread_index(), static_cast<float>(r[0] + r[3]) + shared_at<float>(dynamic_shared())[3]);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
AK_KERNEL(128, 1) ampere_kernel(const float* from, float* out) {
  const uint32_t at = dynamic_shared();
  copy_async<4>(at, from);
  copy_async<8>(at + 8, from, 4);
  copy_async<16>(at + 16, from, 12);
  copy_async<16, true>(at + 32, from, 16);
  copy_commit();
  copy_wait<1>();
  copy_wait<0>();
  store_shared_16(at, load_shared_16(at + 16));
  store_shared_4(at, 1u);
  uint32_t r[4];
  ldmatrix_x4(r, at);
  float d[4] = {};
  mma_m16n8k16<fp16>(d, r, {r[0], r[1]});
  mma_m16n8k16<bf16>(d, r, {r[0], r[1]});
  store(out + thread_index(), d[0] + d[1] + d[2] + d[3]);
}
#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class T, Major kA, Major kB, int kN>
AK_DEVICE float use_wgmma(uint64_t desc) {
  float d[kN / 2], sum = 0;
  wgmma_pin(d);
  wgmma_fence();
  wgmma<T, kA, kB>(d, desc, desc, false);
  wgmma_commit();
  wgmma_wait<0>();
  for (float x : d) sum += x;
  return sum;
}
template <int kN>
AK_KERNEL(128, 1)
wgmma_kernel(float* out) {
  const uint64_t desc = wgmma_descriptor(dynamic_shared(), 16, 1024, Swizzle::k64);
  store(out, use_wgmma<bf16, Major::kK, Major::kMN, kN>(desc) + use_wgmma<fp16, Major::kMN, Major::kK, kN>(desc));
}
template <int... kN>
Status each_n(float* out) {
  Status status;
  ((status = launch(wgmma_kernel<kN>, {.name = "wgmma", .grid = 1, .block = 128}, out)), ...);
  return status;
}
template Status each_n<16, 32, 64, 80, 128, 144, 160, 176, 192, 208, 256>(float*);

AK_KERNEL(384, 1) hopper_kernel(AK_PARAM(TensorMap) map) {
  const uint32_t at = dynamic_shared(), barrier = at + 4096;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (thread_index() < 128) {
    registers_decrease<40>();
  } else {
    registers_increase<232>();
  }
  mbarrier_init(barrier, 1);
  mbarrier_init_fence();
  cluster_sync();
  mbarrier_arrive(barrier);
  mbarrier_arrive_expect_tx(barrier, 4096);
  mbarrier_arrive_cluster(barrier, cluster_rank() ^ 1);
  store_cluster_2(at, barrier, cluster_rank() ^ 1, 1.0f, 2.0f);
  prefetch_tensor_map(&map);
  tma_prefetch(&map, 0, 0, 0);
  tma_load(at, &map, barrier, 0, 0, 0);
  tma_load(at, &map, barrier, 0, 0, 0, 0);
  tma_load_multicast(at, &map, barrier, 0, 0, 0, 3);
  mbarrier_wait(barrier, 0);
  const auto v = load_shared_16(at);
  store_shared_2(at, static_cast<float>(v[0]), load_shared_2(at + 8)[1]);
  stmatrix_x4(at, {round_pair<fp16>(1, 2), round_pair<bf16>(1, 2), v[2], v[3]});
  stmatrix_x4_trans(at, {v[0], v[1], v[2], v[3]});
  fence_proxy_async();
  tma_store(&map, at, 0, 0, 0);
  tma_store(&map, at, 0, 0, 0, 0);
  tma_reduce_add(&map, at, 0, 0, 0);
  bulk_commit();
  bulk_wait_read<1>();
  bulk_wait<0>();
}
#endif

}  // namespace ak
