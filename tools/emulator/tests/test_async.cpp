// The emulator's own tests, part 3: mbarriers, TMA, bulk groups, proxies.
#include <cmath>

#include "base/config.h"
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "emulator/harness.h"

namespace ak::test {
namespace {

enum class Bug {
  kNone,
  kNoInitFence,       // the copy engine may not see the barriers
  kNoInitSync,        // nor may the other threads
  kNoWait,            // reads a stage without waiting for it
  kWrongParity,       // waits for the phase after
  kTooFewBytes,       // expects less than the box brings
  kTooManyBytes,      // expects more
  kDoubleArrival,     // two threads announce the load
  kNoWriteFence,      // stores by TMA what threads have written, without a proxy fence
  kNoWriteSync,       // or before they have
  kFenceTooLate,      // fences only after the barrier
  kNoStoreWait,       // writes the buffer while a store may still read it
  kNoCommit,          // waits for a group that was never closed
  kNoFinalWait,       // exits while a store may still read shared memory
  kMisalignedStage,   // not where the swizzle pattern starts
  kMisalignedColumn,  // not at a multiple of 16 bytes
  kOverlap,           // two blocks store the same box
  kOverBarriers,      // the last stage lies on the barriers
};

constexpr int kRows = 8, kStages = 2;

/// to = 2 from, box by box: loads into a ring of stages, doubles every value in a staging buffer, stores. Block b has
/// every grid-th box.
template <Swizzle kSwizzle, Bug kBug>
AK_KERNEL(64, 1)
double_kernel(AK_PARAM(TensorMap) from, AK_PARAM(TensorMap) to, int boxes_x, int boxes) {
  constexpr int kRowBytes = static_cast<int>(row_bytes(kSwizzle)), kColumns = kRowBytes / 4, kBytes = kRows * kRowBytes;
  const uint32_t ring = ((dynamic_shared() + 1023) & ~1023u) + (kBug == Bug::kMisalignedStage ? 128 : 0);
  const uint32_t staging = ring + kStages * kBytes;
  const uint32_t full = kBug == Bug::kOverBarriers ? ring + kBytes : staging + kBytes, empty = full + 8 * kStages;
  const int t = thread_index();
  if (t == 0) {
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 64);
    }
    if (kBug != Bug::kNoInitFence) mbarrier_init_fence();
  }
  if (kBug != Bug::kNoInitSync) block_sync();
  const int first = kBug == Bug::kOverlap ? 0 : block_index(), step = grid_blocks();
  const auto place = [&](int box, int& x, int& y) {
    x = box % boxes_x * kColumns + (kBug == Bug::kMisalignedColumn ? 1 : 0);
    y = box / boxes_x * kRows;
  };
  const auto request = [&](int box, int stage) {
    int x, y;
    place(box, x, y);
    const int wrong = kBug == Bug::kTooFewBytes ? -16 : kBug == Bug::kTooManyBytes ? 16 : 0;
    if (kBug == Bug::kDoubleArrival && box != first) mbarrier_arrive_expect_tx(full + 8 * stage, 0);
    mbarrier_arrive_expect_tx(full + 8 * stage, kBytes + wrong);
    tma_load(ring + stage * kBytes, &from, full + 8 * stage, x, y, 0);
  };
  int stage = 0, phase = 0;
  if (t == 0 && first < boxes) request(first, 0);
  for (int box = first; box < boxes; box += step) {
    const int next = box + step, next_stage = (stage + 1) % kStages, next_phase = next_stage == 0 ? phase ^ 1 : phase;
    if (t == 0 && next < boxes) {
      mbarrier_wait(empty + 8 * next_stage, next_phase ^ 1);
      request(next, next_stage);
    }
    if (kBug != Bug::kNoWait) mbarrier_wait(full + 8 * stage, kBug == Bug::kWrongParity ? phase ^ 1 : phase);
    if (t == 0 && kBug != Bug::kNoStoreWait) bulk_wait_read<0>();
    block_sync();
    for (int i = t; i < kBytes / 16; i += 64) {
      // Rows of 32 and 64 bytes share a line of 128 with others; the pattern follows the line.
      const auto v = load_shared_16(ring + stage * kBytes + i * 16);
      store_shared_2(staging + i * 16, 2 * float_of(v[0]), 2 * float_of(v[1]));
      store_shared_2(staging + i * 16 + 8, 2 * float_of(v[2]), 2 * float_of(v[3]));
    }
    if (kBug != Bug::kNoWriteFence && kBug != Bug::kFenceTooLate) fence_proxy_async();
    mbarrier_arrive_cluster(empty + 8 * stage, 0);
    if (kBug != Bug::kNoWriteSync) block_sync();
    if (kBug == Bug::kFenceTooLate && t != 0) fence_proxy_async();
    if (t == 0) {
      int x, y;
      place(box, x, y);
      tma_store(&to, staging, x, y, 0);
      if (kBug != Bug::kNoCommit) bulk_commit();
    }
    stage = next_stage;
    phase = next_phase;
  }
  if (t == 0 && kBug != Bug::kNoFinalWait) bulk_wait_read<0>();
}

template <Swizzle kSwizzle, Bug kBug>
std::string double_all(int columns = 72, int rows = 21) {
  constexpr uint32_t kColumns = row_bytes(kSwizzle) / 4;
  emu::Buffer<float> from("from", static_cast<size_t>(rows * columns)), to("to", static_cast<size_t>(rows * columns));
  for (size_t i = 0; i < from.size(); i++) from.set(i, static_cast<float>(i));
  const auto map_of = [&](float* p, TensorMap* map) {
    return make_tensor_map(map, {p,
                                 ElementType::kFloat32,
                                 2,
                                 {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)},
                                 {static_cast<uint64_t>(columns)},
                                 {kColumns, kRows},
                                 kSwizzle});
  };
  TensorMap from_map, to_map;
  if (!map_of(from.data(), &from_map).ok() || !map_of(to.data(), &to_map).ok()) return "no tensor map";
  const int boxes_x = (columns + static_cast<int>(kColumns) - 1) / static_cast<int>(kColumns),
            boxes = boxes_x * ((rows + kRows - 1) / kRows);
  const LaunchConfig config{
      .name = "double", .grid = 2, .block = 64, .shared_bytes = 1024 + 3 * kRows * row_bytes(kSwizzle) + 128 + 32};
  const Status status = launch(double_kernel<kSwizzle, kBug>, config, from_map, to_map, boxes_x, boxes);
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i] != 2 * static_cast<float>(i)) return "to[" + std::to_string(i) + "] is wrong";
  }
  return to.check_written();
}

void tma(Cases& cases) {
  cases.check("128-byte swizzle", [] { return double_all<Swizzle::k128, Bug::kNone>(); });
  cases.check("64-byte swizzle", [] { return double_all<Swizzle::k64, Bug::kNone>(); });
  cases.check("32-byte swizzle", [] { return double_all<Swizzle::k32, Bug::kNone>(); });
  constexpr Swizzle s = Swizzle::k128;
  cases.check_fails("no init fence", "without mbarrier_init_fence()",
                    [] { return double_all<s, Bug::kNoInitFence>(); });
  cases.check_fails("no sync after init", "no barrier after its initialisation",
                    [] { return double_all<s, Bug::kNoInitSync>(); });
  cases.check_fails("no wait for the load", "written by a TMA load that ends on the mbarrier",
                    [] { return double_all<s, Bug::kNoWait>(); });
  cases.check_fails("wrong parity", "double", [] { return double_all<s, Bug::kWrongParity>(); });
  cases.check_fails("too few bytes expected", "16 bytes more than expected arrived",
                    [] { return double_all<s, Bug::kTooFewBytes>(); });
  cases.check_fails("too many bytes expected", "0 of 1 arrivals and 16 bytes are missing",
                    [] { return double_all<s, Bug::kTooManyBytes>(); });
  cases.check_fails("the load announced twice", "double", [] { return double_all<s, Bug::kDoubleArrival>(); });
  cases.check_fails("no fence after writing", "without a fence_proxy_async()",
                    [] { return double_all<s, Bug::kNoWriteFence>(); });
  cases.check_fails("no wait for the writers", "to be read with nothing that orders",
                    [] { return double_all<s, Bug::kNoWriteSync>(); });
  cases.check_fails("fence after the barrier", "without a fence_proxy_async()",
                    [] { return double_all<s, Bug::kFenceTooLate>(); });
  cases.check_fails("buffer reused under a store", "which a TMA store of CTA",
                    [] { return double_all<s, Bug::kNoStoreWait>(); });
  cases.check_fails("group never closed", "not committed", [] { return double_all<s, Bug::kNoCommit>(); });
  cases.check_fails("no final wait", "may still read shared memory", [] { return double_all<s, Bug::kNoFinalWait>(); });
  cases.check_fails("misaligned stage", "where the swizzle pattern starts",
                    [] { return double_all<s, Bug::kMisalignedStage>(); });
  cases.check_fails("misaligned column", "not at a multiple of 16 bytes",
                    [] { return double_all<s, Bug::kMisalignedColumn>(); });
  cases.check_fails("two blocks, one box", "race: 'to'", [] { return double_all<s, Bug::kOverlap>(); });
  cases.check_fails("a stage over the barriers", "is to be overwritten",
                    [] { return double_all<s, Bug::kOverBarriers>(); });
  cases.check_fails("rows that are no multiple of 16 bytes", "no tensor map",
                    [] { return double_all<s, Bug::kNone>(70); });
}

// ---- loading over what threads have read

enum class ReloadBug { kNone, kNoFence, kNoSync };

/// All threads read one box after the other from the same place.
template <ReloadBug kBug>
AK_KERNEL(64, 1)
reload_kernel(AK_PARAM(TensorMap) from, float* out, int boxes) {
  const uint32_t box = (dynamic_shared() + 1023) & ~1023u, full = box + 8 * 128, empty = full + 8;
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 64);
    mbarrier_init_fence();
  }
  block_sync();
  for (int i = 0; i < boxes; i++) {
    if (t == 0) {
      if (kBug != ReloadBug::kNoSync) mbarrier_wait(empty, i % 2 ^ 1);
      mbarrier_arrive_expect_tx(full, 8 * 128);
      tma_load(box, &from, full, 0, 8 * i, 0);
    }
    mbarrier_wait(full, i % 2);
    const auto v = load_shared_16(box + t * 16);
    if (kBug != ReloadBug::kNoFence) fence_proxy_async();
    mbarrier_arrive_cluster(empty, 0);
    store_vec(out + (i * 64 + t) * 4, Vec<float, 4>{{float_of(v[0]), float_of(v[1]), float_of(v[2]), float_of(v[3])}});
  }
}

template <ReloadBug kBug>
std::string reload() {
  emu::Buffer<float> from("from", 4 * 8 * 32), out("out", 4 * 8 * 32);
  for (size_t i = 0; i < from.size(); i++) from.set(i, static_cast<float>(i / 32));
  TensorMap map;
  if (!make_tensor_map(&map, {from.data(), ElementType::kFloat32, 2, {32, 32}, {32}, {32, 8}}).ok())
    return "no tensor map";
  const Status status = launch(
      reload_kernel<kBug>, {.name = "reload", .grid = 1, .block = 64, .shared_bytes = 2048 + 16}, map, out.data(), 4);
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < out.size(); i++) {
    if (out[i] != from[i]) return "wrong value";
  }
  return out.check_written();
}

void reloads(Cases& cases) {
  cases.check("loading over what was read", [] { return reload<ReloadBug::kNone>(); });
  cases.check_fails("no fence after reading", "read by CTA 0", [] { return reload<ReloadBug::kNoFence>(); });
  cases.check_fails("no wait for the readers", "is to be overwritten with nothing that orders",
                    [] { return reload<ReloadBug::kNoSync>(); });
}

// ---- three dimensions, reductions, multicast

/// Block b moves plane b: loads one box, stores it to `to` and adds it to `sum`; the box hangs over the edges on all
/// sides.
AK_KERNEL(32, 1) plane_kernel(AK_PARAM(TensorMap) from, AK_PARAM(TensorMap) to, AK_PARAM(TensorMap) sum) {
  const uint32_t box = (dynamic_shared() + 1023) & ~1023u, full = box + 2 * 8 * 128;
  if (thread_index() != 0) return;
  mbarrier_init(full, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect_tx(full, 2 * 8 * 128);
  tma_load(box, &from, full, -4, -1, 2 * block_index());
  mbarrier_wait(full, 0);
  tma_store(&to, box, -4, -1, 2 * block_index());
  tma_reduce_add(&sum, box, 0, 0, 0);
  bulk_commit();
  bulk_wait<0>();
}

/// The planes are `columns` wide of 20 in memory, and hold `unit`, 2 units and so on; sum starts as `initial`.
std::string planes(bool initialise_sum, uint64_t columns = 20, float unit = 1, float initial = 1) {
  constexpr int kX = 20, kY = 5, kZ = 3;
  emu::Buffer<float> from("from", kX * kY * kZ), to("to", kX * kY * kZ), sum("sum", 32 * 8);
  for (size_t i = 0; i < from.size(); i++) from.set(i, unit * static_cast<float>(1 + i));
  if (initialise_sum) sum.fill(initial);
  TensorMap maps[3];
  TensorMapSpec spec{from.data(), ElementType::kFloat32, 3, {columns, kY, kZ}, {kX, kX * kY}, {32, 8, 2}};
  bool ok = make_tensor_map(&maps[0], spec).ok();
  spec.base = to.data();
  ok = ok && make_tensor_map(&maps[1], spec).ok();
  ok = ok && make_tensor_map(&maps[2], {sum.data(), ElementType::kFloat32, 2, {32, 8}, {32}, {32, 8}}).ok();
  if (!ok) return "no tensor map";
  const Status status =
      launch(plane_kernel, {.name = "planes", .grid = 2, .block = 32, .shared_bytes = 1024 + 2 * 8 * 128 + 8}, maps[0],
             maps[1], maps[2]);
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i] != from[i]) return "wrong copy";
  }
  for (int y = 0; y < 8; y++) {
    for (int x = 0; x < 32; x++) {
      const bool inside = x >= 4 && x < 4 + kX && y >= 1 && y < 1 + kY;
      const auto at = [&](int z) { return from[static_cast<size_t>((z * kY + y - 1) * kX + x - 4)]; };
      const bool counts = inside && unit >= 0x1p-126f;  // subnormal numbers are flushed
      if (sum[static_cast<size_t>(y * 32 + x)] != initial + (counts ? at(0) + at(2) : 0.0f)) return "wrong sum";
    }
  }
  return to.check_written();
}

/// Writes a box, stores it by TMA or with threads, and loads it again.
template <bool kByThreads, bool kWait>
AK_KERNEL(32, 1)
back_and_forth_kernel(AK_PARAM(TensorMap) map, float* global) {
  const uint32_t box = (dynamic_shared() + 1023) & ~1023u, again = box + 1024, full = again + 1024;
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  for (int i = t; i < 128; i += 32) store_shared_2(box + i * 8, 1.0f, 1.0f);
  fence_proxy_async();
  for (int i = t; kByThreads && i < 256; i += 32) store(global + i, 1.0f);
  warp_sync();
  if (t == 0) {
    if (!kByThreads) tma_store(&map, box, 0, 0, 0);
    bulk_commit();
    if (kWait) bulk_wait<0>();
    mbarrier_arrive_expect_tx(full, 1024);
    tma_load(again, &map, full, 0, 0, 0);
    bulk_wait<0>();
  }
  mbarrier_wait(full, 0);
  if (float_of(load_shared_16(again + t * 16)[0]) != 1.0f) store(global + 256, 1.0f);
}

template <bool kByThreads, bool kWait>
std::string back_and_forth() {
  emu::Buffer<float> global("global", 257);
  TensorMap map;
  if (!make_tensor_map(&map, {global.data(), ElementType::kFloat32, 2, {32, 8}, {32}, {32, 8}}).ok())
    return "no tensor map";
  const LaunchConfig config{.name = "back_and_forth", .grid = 1, .block = 32, .shared_bytes = 1024 + 2048 + 8};
  const Status status = launch(back_and_forth_kernel<kByThreads, kWait>, config, map, global.data());
  if (!status.ok()) return status.message;
  return global[256] == 1.0f ? "wrong value" : "";
}

/// Commits a group without a store in it, as who finds nothing to store.
AK_KERNEL(32, 1) empty_group_kernel() {
  if (thread_index() != 0) return;
  bulk_commit();
  bulk_wait_read<0>();
}

/// Block 0 multicasts one box to both blocks of the cluster.
template <bool kBothExpect>
AK_KERNEL(32, 1)
multicast_kernel(AK_PARAM(TensorMap) from, float* out) {
  const uint32_t box = (dynamic_shared() + 1023) & ~1023u, full = box + 8 * 128;
  if (thread_index() == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    if (kBothExpect || cluster_rank() == 0) mbarrier_arrive_expect_tx(full, 8 * 128);
  }
  cluster_sync();
  if (thread_index() == 0 && cluster_rank() == 0) tma_load_multicast(box, &from, full, 0, 0, 0, 0b11);
  mbarrier_wait(full, 0);
  for (int row = 0; row < 8; row++) {
    const int chunk = thread_index() / 4 ^ row;
    const auto v = load_shared_16(box + row * 128 + chunk * 16);
    store(out + block_index() * 256 + row * 32 + thread_index(), float_of(v[thread_index() % 4]));
  }
  cluster_sync();
}

template <bool kBothExpect>
std::string multicast() {
  emu::Buffer<float> from("from", 256), out("out", 512);
  for (size_t i = 0; i < 256; i++) from.set(i, static_cast<float>(i));
  TensorMap map;
  if (!make_tensor_map(&map, {from.data(), ElementType::kFloat32, 2, {32, 8}, {32}, {32, 8}}).ok())
    return "no tensor map";
  const LaunchConfig config{.name = "multicast", .grid = 2, .block = 32, .shared_bytes = 1024 + 1024 + 8, .cluster = 2};
  const Status status = launch(multicast_kernel<kBothExpect>, config, map, out.data());
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < 512; i++) {
    if (out[i] != static_cast<float>(i % 256)) return "wrong value";
  }
  return out.check_written();
}

void boxes(Cases& cases) {
  cases.check("3-D boxes over every edge, reduction", [] { return planes(true); });
  cases.check("a reduction of subnormal numbers", [] { return planes(true, 20, 0x1p-140f, 0.0f); });
  cases.check_fails("a store that ends within 16 bytes", "ends within 16 bytes", [] { return planes(true, 18); });
  cases.check_fails("adding to uninitialised memory", "uninitialised read of 'sum'", [] { return planes(false); });
  cases.check("load of what was stored", [] { return back_and_forth<false, true>(); });
  cases.check_fails("load while the store is under way", "race: 'global'",
                    [] { return back_and_forth<false, false>(); });
  cases.check_fails("load of what threads have written", "no fence of csrc/device",
                    [] { return back_and_forth<true, true>(); });
  cases.check("a group of no stores",
              [] { return message_of(launch(empty_group_kernel, {.name = "empty group", .grid = 1, .block = 32})); });
  cases.check("multicast", [] { return multicast<true>(); });
  cases.check_fails("a block that does not expect the multicast", "-1024 bytes are missing",
                    [] { return multicast<false>(); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("async", ak::test::Seeds(argc, argv, 24));
  ak::test::tma(cases);
  ak::test::reloads(cases);
  ak::test::boxes(cases);
  return cases.finish();
}
