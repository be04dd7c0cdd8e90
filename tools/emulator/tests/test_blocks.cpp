// The emulator's own tests, part 2: warps, blocks, clusters, registers, launches; deadlocks and who is to blame; replay
// by seed.
#include "base/config.h"
#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/mbarrier.cuh"
#include "device/registers.cuh"
#include "emulator/harness.h"

namespace ak::test {
namespace {

template <class... Params, class... Args>
std::string run(void (*kernel)(Params...), LaunchConfig config, Args... args) {
  return message_of(launch(kernel, config, args...));
}

// ---- barriers

AK_KERNEL(128, 1) half_a_block_kernel() {
  if (warp_index() < 2) block_sync();
}
AK_KERNEL(128, 1) two_counts_kernel() { named_barrier(3, warp_index() < 2 ? 64 : 128); }
AK_KERNEL(32, 1) diverged_warp_kernel() {
  if (lane_index() < 16) {
    warp_sync();
  } else {
    ballot(true);
  }
}
AK_KERNEL(128, 1) halves_kernel(int* out) {
  auto value = shared<int, 2>();
  const int half = thread_index() / 64;
  for (int round = 0; round < 3; round++) {
    if (thread_index() % 64 == 0) value[half] = round;
    named_barrier(1 + half, 64);
    const int seen = value[half];
    named_barrier(1 + half, 64);
    store(out + round * 128 + thread_index(), seen);
  }
}

enum class TurnBug { kNone, kNoWait, kNoArrival, kWrongOwner, kArrivesAtTheEnd };

/// Two warps take turns with one value: who is done comes to the other's barrier and goes on without waiting.
template <TurnBug kBug>
AK_KERNEL(64, 1)
turns_kernel(int* out) {
  constexpr int kRounds = 3;
  auto value = shared<int, 1>();
  const int me = warp_index(), other = 1 - me;
  for (int round = 0; round < kRounds; round++) {
    const int turn = 2 * round + me;
    if (turn > 0 && kBug != TurnBug::kNoWait) named_barrier(1 + (kBug == TurnBug::kWrongOwner ? other : me), 64);
    if (lane_index() == 0) {
      const int seen = turn > 0 ? static_cast<int>(value[0]) : 0;
      value[0] = seen + turn;
      store(out + turn, seen + turn);
    }
    const bool more = turn + 1 < 2 * kRounds || kBug == TurnBug::kArrivesAtTheEnd;
    if (more && kBug != TurnBug::kNoArrival) named_barrier_arrive(1 + other, 64);
  }
}
template <TurnBug kBug>
std::string turns() {
  emu::Buffer<int> out("out", 6);
  const std::string error = run(turns_kernel<kBug>, {.name = "turns", .grid = 1, .block = 64}, out.data());
  if (!error.empty()) return error;
  for (int i = 0, sum = 0; i < 6; i++) {
    if (out[static_cast<size_t>(i)] != (sum += i)) return "wrong value";
  }
  return "";
}

void turns(Cases& cases) {
  cases.check("two warps in turn", turns<TurnBug::kNone>);
  cases.check_fails("the next one does not wait", "a second time", turns<TurnBug::kNoWait>);
  cases.check_fails("nobody hands over", "32 of 64 threads have come", turns<TurnBug::kNoArrival>);
  cases.check_fails("waits at the other's barrier", "a second time", turns<TurnBug::kWrongOwner>);
  cases.check_fails("hands over to nobody", "nobody waits there", turns<TurnBug::kArrivesAtTheEnd>);
}

void barriers(Cases& cases) {
  cases.check_fails("half of the block at a barrier",
                    "64 threads (warps 0-1) of CTA 0 waits in block_sync: 64 of 128 threads have come",
                    [] { return run(half_a_block_kernel, {.name = "k", .grid = 1, .block = 128}); });
  cases.check_fails("one barrier, two counts", "others called it for",
                    [] { return run(two_counts_kernel, {.name = "k", .grid = 1, .block = 128}); });
  cases.check_fails("lanes in different collectives", "others that must do the same are in",
                    [] { return run(diverged_warp_kernel, {.name = "k", .grid = 1, .block = 32}); });
  cases.check("named barriers of two halves", [] {
    emu::Buffer<int> out("out", 3 * 128);
    const std::string error = run(halves_kernel, {.name = "halves", .grid = 1, .block = 128}, out.data());
    if (!error.empty()) return error;
    for (size_t i = 0; i < 3 * 128; i++) {
      if (out[i] != static_cast<int>(i / 128)) return std::string("wrong value");
    }
    return out.check_written();
  });
}

// ---- clusters

enum class ClusterBug { kNone, kNoFirstSync, kNoInitFence, kNoLastSync, kTooManyArrivals };

/// Each block arrives on its peer's barrier and waits for its peer's arrival on its own.
template <ClusterBug kBug>
AK_KERNEL(32, 1)
greet_kernel(unsigned* out) {
  const uint32_t barrier = dynamic_shared(), peer = cluster_rank() ^ 1;
  if (thread_index() == 0) {
    mbarrier_init(barrier, 1);
    if (kBug != ClusterBug::kNoInitFence) mbarrier_init_fence();
  }
  if (kBug == ClusterBug::kNoFirstSync) {
    block_sync();
  } else {
    cluster_sync();
  }
  if (thread_index() < (kBug == ClusterBug::kTooManyArrivals ? 2 : 1)) mbarrier_arrive_cluster(barrier, peer);
  if (kBug == ClusterBug::kNoLastSync && cluster_rank() == 0) return;
  mbarrier_wait(barrier, 0);
  if (thread_index() == 0) store(out + block_index(), cluster_rank());
  if (kBug != ClusterBug::kNoLastSync) cluster_sync();
}

template <ClusterBug kBug>
std::string greet() {
  emu::Buffer<unsigned> out("out", 4);
  const std::string error =
      run(greet_kernel<kBug>, {.name = "greet", .grid = 4, .block = 32, .shared_bytes = 16, .cluster = 2}, out.data());
  if (!error.empty()) return error;
  for (size_t i = 0; i < 4; i++) {
    if (out[i] != i % 2) return "wrong rank";
  }
  return out.check_written();
}

void clusters(Cases& cases) {
  cases.check("remote arrivals", [] { return greet<ClusterBug::kNone>(); });
  cases.check_fails("peer not ready", "greet", [] { return greet<ClusterBug::kNoFirstSync>(); });
  cases.check_fails("no init fence", "without mbarrier_init_fence()", [] { return greet<ClusterBug::kNoInitFence>(); });
  cases.check_fails("peer has exited", "has exited", [] { return greet<ClusterBug::kNoLastSync>(); });
  cases.check_fails("a second arrival ends a second phase", "mbarrier_wait: mbarrier at shared memory + 0x",
                    [] { return greet<ClusterBug::kTooManyArrivals>(); });
  cases.check_fails("a grid that is no multiple of the cluster", "cluster = 2 does not divide grid = 3", [] {
    emu::Buffer<unsigned> out("out", 4);
    return run(greet_kernel<ClusterBug::kNone>,
               {.name = "greet", .grid = 3, .block = 32, .shared_bytes = 16, .cluster = 2}, out.data());
  });
}

enum class SendBug { kNone, kNoFirstSync, kNoInitFence, kNoWait, kTooManyBytes, kNoReadSync, kOtherBarrier };

/// Each block sends two floats to both blocks, twice over into the same place.
template <SendBug kBug>
AK_KERNEL(64, 1)
send_kernel(float* out) {
  const uint32_t sent = dynamic_shared(), barrier = sent + 16, rank = cluster_rank();
  if (thread_index() == 0) {
    mbarrier_init(barrier, 1);
    if (kBug != SendBug::kNoInitFence) mbarrier_init_fence();
  }
  if (kBug == SendBug::kNoFirstSync) {
    block_sync();
  } else {
    cluster_sync();
  }
  for (int round = 0; round < 2; round++) {
    const float value = static_cast<float>(2 * round + static_cast<int>(rank));
    if (thread_index() == 0) mbarrier_arrive_expect_tx(barrier, kBug == SendBug::kTooManyBytes ? 24 : 16);
    if (thread_index() < 2) {
      const uint32_t signalled = kBug == SendBug::kOtherBarrier ? barrier + 8 : barrier;
      store_cluster_2(sent + 8 * rank, signalled, static_cast<uint32_t>(thread_index()), value, -value);
    }
    if (kBug != SendBug::kNoWait) mbarrier_wait(barrier, round);
    if (warp_index() == 1 && lane_index() < 2)
      store(out + (2 * block_index() + round) * 2 + lane_index(), load_shared_2(sent + 8 * lane_index())[1]);
    if (kBug != SendBug::kNoReadSync) cluster_sync();
  }
}

template <SendBug kBug>
std::string send() {
  emu::Buffer<float> out("out", 8);
  const std::string error =
      run(send_kernel<kBug>, {.name = "send", .grid = 2, .block = 64, .shared_bytes = 32, .cluster = 2}, out.data());
  if (!error.empty()) return error;
  for (size_t i = 0; i < 8; i++) {
    if (out[i] != -static_cast<float>(i % 4)) return "wrong value";
  }
  return out.check_written();
}

void sends(Cases& cases) {
  cases.check("stores to a peer", [] { return send<SendBug::kNone>(); });
  cases.check_fails("the peer has no barrier yet", "send", [] { return send<SendBug::kNoFirstSync>(); });
  cases.check_fails("no init fence", "without mbarrier_init_fence()", [] { return send<SendBug::kNoInitFence>(); });
  cases.check_fails("no wait for what a peer stores", "race: read of shared memory",
                    [] { return send<SendBug::kNoWait>(); });
  cases.check_fails("more bytes expected than stored", "0 of 1 arrivals and 8 bytes are missing",
                    [] { return send<SendBug::kTooManyBytes>(); });
  cases.check_fails("stored again while others read", "race: write of shared memory",
                    [] { return send<SendBug::kNoReadSync>(); });
  cases.check_fails("bytes that complete on no barrier", "no mbarrier was initialised",
                    [] { return send<SendBug::kOtherBarrier>(); });
}

// ---- registers: 384 threads are given 168 each, 504 in all

template <int kProducer, int kConsumer>
AK_KERNEL(384, 1)
registers_kernel() {
  if (thread_index() < 128) {
    registers_decrease<kProducer>();
  } else {
    registers_increase<kConsumer>();
  }
}
AK_KERNEL(128, 1) half_a_warpgroup_kernel() {
  if (warp_index() < 2) registers_decrease<40>();
}

void registers(Cases& cases) {
  const LaunchConfig config{.name = "registers", .grid = 1, .block = 384};
  cases.check("40 + 2 x 232", [&] { return run(registers_kernel<40, 232>, config); });
  cases.check_fails("40 + 2 x 240", "240 registers a thread, 168 owned, only",
                    [&] { return run(registers_kernel<40, 240>, config); });
  cases.check_fails("an increase that is a decrease", "owns 168 registers a thread and asks for 160",
                    [&] { return run(registers_kernel<40, 160>, config); });
  cases.check_fails("half a warpgroup", "64 of 128 threads have come",
                    [&] { return run(half_a_warpgroup_kernel, {.name = "half", .grid = 1, .block = 128}); });
}

// ---- launches

AK_KERNEL(32, 1) dependent_kernel(float* out, bool wait) {
  if (wait) wait_for_previous_kernel();
  store(out + thread_index(), 1.0f);
  allow_next_kernel();
}
/// Waits for a flag that only a later block sets: right only if both are on the machine at once.
AK_KERNEL(32, 1) spin_kernel(unsigned* flag) {
  if (block_index() == grid_blocks() - 1) {
    if (thread_index() == 0) atomic_add(flag, 1u);
    return;
  }
  if (thread_index() != 0) return;
  while (atomic_add(flag, 0u) == 0) {
  }
}

void launches(Cases& cases) {
  const auto dependent = [](bool wait) {
    emu::Buffer<float> out("out", 32);
    return run(dependent_kernel, {.name = "dependent", .grid = 1, .block = 32, .overlap_previous = true}, out.data(),
               wait);
  };
  cases.check("waits for the kernel in front", [&] { return dependent(true); });
  cases.check_fails("does not wait for the kernel in front", "before wait_for_previous_kernel()",
                    [&] { return dependent(false); });
  const auto spin = [](int resident) {
    emu::options().resident_threads = resident;
    emu::options().max_switches = 100000;
    emu::Buffer<unsigned> flag("flag", std::vector<unsigned>(1, 0u));
    return run(spin_kernel, {.name = "spin", .grid = 3, .block = 32}, flag.data());
  };
  cases.check("spinning on a block that runs", [&] { return spin(96); });
  cases.check_fails("spinning on a block that cannot start", "livelock", [&] { return spin(64); });
  cases.check_fails("a block of 33 threads", "block = 33", [] {
    emu::Buffer<unsigned> flag("flag", 1);
    return run(spin_kernel, {.name = "spin", .grid = 1, .block = 33}, flag.data());
  });
}

/// Adds thread numbers in the order in which threads come: the bits of the sum tell the schedule.
AK_KERNEL(64, 1) order_kernel(float* sum) {
  for (int i = 0; i < 4; i++) atomic_add(sum, 1.0f / static_cast<float>(1 + thread_index() + 64 * block_index()));
}

void replay(Cases& cases) {
  const auto order = [] {
    emu::Buffer<float> sum("sum", std::vector<float>(1, 0.0f));
    const std::string error = run(order_kernel, {.name = "order", .grid = 3, .block = 64}, sum.data());
    return error.empty() ? std::to_string(bits_of(sum[0])) : error;
  };
  cases.check("a seed replays its schedule", [&] { return order() == order() ? "" : "two runs of one seed differ"; });
  std::vector<std::string> seen;
  cases.check("seeds differ", [&] {
    const std::string now = order();
    int same = 0;
    for (const std::string& other : seen) same += other == now;
    seen.push_back(now);
    return same > static_cast<int>(seen.size()) / 2 ? "most seeds give the same schedule" : "";
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("blocks", ak::test::Seeds(argc, argv, 12));
  ak::test::barriers(cases);
  ak::test::turns(cases);
  ak::test::clusters(cases);
  ak::test::sends(cases);
  ak::test::registers(cases);
  ak::test::launches(cases);
  ak::test::replay(cases);
  return cases.finish();
}
