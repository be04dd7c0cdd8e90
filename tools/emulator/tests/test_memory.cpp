// The emulator's own tests, part 1: global and shared memory, races, atomics, reductions. Every check is shown to fire
// on a kernel with one thing wrong, and to stay silent on the right one.
#include <cmath>

#include "device/block.cuh"
#include "emulator/harness.h"
#include "emulator/shadow.h"

namespace ak::test {
namespace {

// ---- global memory

AK_KERNEL(64, 1) copy_kernel(const float* from, float* to, int n) {
  for (int i = 4 * (block_index() * block_threads() + thread_index()); i < n;
       i += 4 * grid_blocks() * block_threads()) {
    store_vec<Cache::kStreaming>(to + i, load_vec<4, Cache::kStreaming>(from + i));
  }
}

void global_memory(Cases& cases) {
  const auto copy = [](const float* from, float* to, int n) {
    return message_of(launch(copy_kernel, {.name = "copy", .grid = 2, .block = 64}, from, to, n));
  };
  const std::vector<float> values(1000, 1.5f);
  cases.check("copy", [&] {
    emu::Buffer<float> from("from", values), to("to", values.size());
    const std::string error = copy(from.data(), to.data(), 1000);
    if (!error.empty()) return error;
    for (size_t i = 0; i < values.size(); i++) {
      if (to[i] != 1.5f) return std::string("wrong value");
    }
    return to.check_written();
  });
  cases.check_fails("load past the end", "16 bytes that end 8 bytes after the end of 'from'", [&] {
    emu::Buffer<float> from("from", std::vector<float>(998, 1.0f)), to("to", 1000);
    return copy(from.data(), to.data(), 1000);
  });
  cases.check_fails("store past the end", "store: out of bounds: 16 bytes that end 16 bytes after the end of 'to'",
                    [&] {
                      emu::Buffer<float> from("from", values), to("to", 996);
                      return copy(from.data(), to.data(), 1000);
                    });
  cases.check_fails("store before the start", "before 'to'", [&] {
    emu::Buffer<float> from("from", values), to("to", 1000);
    return copy(from.data(), to.data() - 4, 4);
  });
  cases.check_fails("misaligned vector", "not aligned to 16 bytes", [&] {
    emu::Buffer<float> from("from", values, 1), to("to", 1000);
    return copy(from.data(), to.data(), 1000);
  });
  cases.check_fails("uninitialised read", "load: uninitialised read of 'from' + 20", [&] {
    emu::Buffer<float> from("from", 1000), to("to", 1000);
    for (size_t i = 0; i < 500; i++) from.set(i, 0.0f);
    return copy(from.data(), to.data(), 1000);
  });
  cases.check_fails("unwritten output", "to[996] was never written", [&] {
    emu::Buffer<float> from("from", values), to("to", 1000);
    const std::string error = copy(from.data(), to.data(), 996);
    return error.empty() ? to.check_written() : error;
  });
  cases.check_fails("every error names its place", "kernel copy, seed 3: CTA 1, warp 1 (thread ", [&] {
    emu::options().seed = 3;
    emu::Buffer<float> from("from", std::vector<float>(384, 1.0f)), to("to", 512);
    return copy(from.data(), to.data(), 512);
  });
}

// ---- what is remembered of reads

/// A hundred threads read one word three times, and know of each other's earlier reads. The writer knows of all of them
/// but that `unknown`, which read it once.
std::string writer_knows_all_but(int unknown) {
  constexpr emu::Actor kReaders = 100, kWriter = kReaders;
  const auto knowledge = [unknown](emu::Epoch epoch) {
    emu::Snapshot seen{std::vector<emu::Epoch>(kReaders, epoch)};
    if (unknown >= 0) seen.seen[static_cast<size_t>(unknown)] = 0;
    return std::make_shared<const emu::Snapshot>(std::move(seen));
  };
  const auto clock = [](emu::Actor actor, emu::Epoch now, emu::Knowledge base) {
    emu::Clock c;
    c.actor = actor, c.now = now, c.base = std::move(base);
    return c;
  };
  emu::Shadow shadow(4);
  for (emu::Epoch now = 1; now <= 3; now++) {
    for (emu::Actor reader = 0; reader < kReaders; reader++) {
      if (now > 1 && static_cast<int>(reader) == unknown) continue;
      if (shadow.read(0, 4, clock(reader, now, knowledge(now - 1)))) return "a read is no conflict";
    }
  }
  const emu::Shadow::Conflict conflict =
      shadow.write(0, 4, clock(kWriter, 1, knowledge(3)), emu::Access::of(kWriter, 1));
  if (unknown < 0) return conflict.access ? "all reads were known" : "";
  if (!conflict.access || conflict.was_write) return emu::format("the read of thread %d was forgotten", unknown);
  return static_cast<int>(conflict.access.actor()) == unknown ? "" : "a read that was known";
}

void remembered_reads(Cases& cases) {
  for (int unknown = -1; unknown < 100; unknown++) {
    cases.check("reads by many", [unknown] { return writer_knows_all_but(unknown); });
  }
}

// ---- races in shared memory

enum class Sync { kNone, kWarp, kBlock };

/// Every thread writes its value and reads the one `distance` threads on; then everything again, shifted.
template <Sync kBetween, Sync kAfter>
AK_KERNEL(128, 1)
rotate_kernel(int distance, int* out) {
  auto values = shared<int, 128>();
  const int t = thread_index();
  const auto sync = [](Sync how) {
    if (how == Sync::kWarp) warp_sync();
    if (how == Sync::kBlock) block_sync();
  };
  for (int round = 0; round < 2; round++) {
    values[t] = t + round;
    sync(kBetween);
    store(out + round * 128 + t,
          static_cast<int>(values[t / 32 * 32 % 128 + (t + distance) % (distance < 32 ? 32 : 128) % 128]));
    sync(kAfter);
  }
}

template <Sync kBetween, Sync kAfter>
std::string rotate(int distance) {
  emu::Buffer<int> out("out", 256);
  const Status status =
      launch(rotate_kernel<kBetween, kAfter>, {.name = "rotate", .grid = 1, .block = 128}, distance, out.data());
  return status.ok() ? out.check_written() : status.message;
}

void shared_races(Cases& cases) {
  cases.check("block_sync on both sides", [] { return rotate<Sync::kBlock, Sync::kBlock>(1); });
  cases.check("warp_sync within a warp", [] { return rotate<Sync::kWarp, Sync::kWarp>(1); });
  cases.check_fails("read before the write is ordered", "read of shared memory",
                    [] { return rotate<Sync::kNone, Sync::kBlock>(1); });
  cases.check_fails("write while others may still read", "race: write of shared memory",
                    [] { return rotate<Sync::kBlock, Sync::kNone>(1); });
  cases.check_fails("warp_sync is not enough across warps", "race: read of shared memory",
                    [] { return rotate<Sync::kWarp, Sync::kBlock>(64); });
}

AK_KERNEL(32, 1) uninitialised_shared_kernel(float* out) {
  auto values = shared<float, 64>();
  values[thread_index()] = 1.0f;
  warp_sync();
  store(out + thread_index(), static_cast<float>(values[thread_index() + 1]));
}

AK_KERNEL(32, 1) large_shared_kernel() {
  shared<float, 60000>()[thread_index()] = 1.0f;  // 240,000 bytes
}

AK_KERNEL(32, 1) outside_shared_kernel(float* out) {
  auto values = shared<float, 32>();
  values[thread_index()] = 0.0f;
  warp_sync();
  store(out + thread_index(), static_cast<float>(values[thread_index() + 8192]));
}

/// Swaps neighbouring 16 bytes, and marks the first 4 of each.
AK_KERNEL(32, 1) words_kernel(const uint32_t* from, uint32_t* to, int skew) {
  const uint32_t mine = dynamic_shared() + static_cast<uint32_t>(thread_index()) * 16;
  store_shared_16(mine + static_cast<uint32_t>(skew), load_vec<4>(from + 4 * thread_index()));
  warp_sync();
  const auto v = load_shared_16(dynamic_shared() + static_cast<uint32_t>(thread_index() ^ 1) * 16);
  warp_sync();
  store_shared_16(mine, v);
  store_shared_4(mine + static_cast<uint32_t>(skew / 8), 7u);
  store_vec(to + 4 * thread_index(), load_shared_16(mine));
}

void shared_words(Cases& cases) {
  const auto swap = [](int skew) {
    emu::Buffer<uint32_t> from("from", 128), to("to", 128);
    for (size_t i = 0; i < 128; i++) from.set(i, static_cast<uint32_t>(100 + i));
    const LaunchConfig config{.name = "words", .grid = 1, .block = 32, .shared_bytes = 32 * 16 + 16};
    const Status status = launch(words_kernel, config, from.data(), to.data(), skew);
    if (!status.ok()) return std::string(status.message);
    for (size_t i = 0; i < 128; i++) {
      if (to[i] != (i % 4 == 0 ? 7u : from[i ^ 4])) return std::string("wrong value");
    }
    return std::string();
  };
  cases.check("16 bytes and 4", [&] { return swap(0); });
  cases.check_fails("16 bytes at an odd multiple of 8", "store_shared_16: ", [&] { return swap(8); });
}

void shared_limits(Cases& cases) {
  emu::Buffer<float> out("out", 32);
  const auto run = [&](void (*kernel)(float*)) {
    return message_of(launch(kernel, {.name = "shared", .grid = 1, .block = 32}, out.data()));
  };
  cases.check_fails("uninitialised shared memory", "uninitialised read of shared memory",
                    [&] { return run(uninitialised_shared_kernel); });
  cases.check_fails("outside shared memory", "are outside of the block's", [&] { return run(outside_shared_kernel); });
  cases.check_fails("more shared memory than there is", "240000 bytes of shared memory are needed",
                    [] { return message_of(launch(large_shared_kernel, {.name = "large", .grid = 1, .block = 32})); });
  cases.check_fails("more dynamic shared memory than there is", "at most 232448 is accepted", [] {
    return message_of(launch(large_shared_kernel, {.name = "large", .grid = 1, .block = 32, .shared_bytes = 232449}));
  });
}

// ---- atomics, reductions

enum class Publish { kLastBlockDone, kRelaxed };

/// Blocks leave partial sums; the one that counts itself last adds them.
template <Publish kHow>
AK_KERNEL(64, 1)
sum_kernel(const float* x, int n, float* partials, unsigned* counter, float* total) {
  float sum = 0;
  for (int i = block_index() * 64 + thread_index(); i < n; i += 64 * grid_blocks()) sum += load(x + i);
  sum = block_sum<64>(sum);
  if (thread_index() == 33) store(partials + block_index(), sum);  // not the thread that counts
  bool last = false;
  if constexpr (kHow == Publish::kLastBlockDone) {
    last = last_block_done(counter);
  } else {
    block_sync();
    if (thread_index() == 0) last = atomic_add(counter, 1u) == static_cast<unsigned>(grid_blocks()) - 1;
  }
  if (last && thread_index() == 0) {
    float all = 0;
    for (int b = 0; b < grid_blocks(); b++) all += load(partials + b);
    store(total, all);
  }
}

template <Publish kHow>
std::string sum() {
  emu::options().resident_threads = 64 * 3;  // the last blocks start when the first ones are done
  emu::Buffer<float> x("x", std::vector<float>(1000, 0.5f)), partials("partials", 5), total("total", 1);
  emu::Buffer<unsigned> counter("counter", std::vector<unsigned>(1, 0u));
  const Status status = launch(sum_kernel<kHow>, {.name = "sum", .grid = 5, .block = 64}, x.data(), 1000,
                               partials.data(), counter.data(), total.data());
  if (!status.ok()) return status.message;
  if (total[0] != 500.0f) return "wrong sum";
  return kHow == Publish::kLastBlockDone && counter[0] != 0 ? "the counter was not left at 0" : "";
}

AK_KERNEL(96, 1) atomic_kernel(float* sum, bool plain) {
  if (plain && thread_index() == 5) {
    store(sum, 1.0f);
  } else {
    atomic_add(sum, 1.0f);
  }
}

AK_KERNEL(96, 1) reduce_kernel(float* out) {
  const float t = static_cast<float>(thread_index());
  const float sum = block_sum<96>(t), again = block_sum<96>(2 * t);
  const float largest = block_reduce<96>(t, [](float a, float b) { return a > b ? a : b; });
  const unsigned odd = ballot(thread_index() % 2 == 1);
  const int from_lane_3 = shuffle(thread_index(), 3);
  const bool ok = sum == 4560 && again == 9120 && largest == 95 && odd == 0xaaaaaaaau &&
                  from_lane_3 == warp_index() * 32 + 3 && warp_any(lane_index() == 7) && warp_sum(1) == 32;
  store(out + thread_index(), ok ? 1.0f : 0.0f);
}

void atomics(Cases& cases) {
  cases.check("last_block_done", [] { return sum<Publish::kLastBlockDone>(); });
  cases.check_fails("a relaxed atomic", "race: read of 'partials'", [] { return sum<Publish::kRelaxed>(); });
  const auto add = [](bool plain) {
    emu::Buffer<float> total("total", std::vector<float>(1, 0.0f));
    const Status status = launch(atomic_kernel, {.name = "atomic", .grid = 2, .block = 96}, total.data(), plain);
    return !status.ok() ? std::string(status.message) : total[0] != 192.0f ? "wrong count" : "";
  };
  cases.check("atomic_add", [&] { return add(false); });
  cases.check_fails("plain store beside atomics", "race: ", [&] { return add(true); });
  cases.check("reductions", [] {
    emu::Buffer<float> out("out", 96);
    const Status status = launch(reduce_kernel, {.name = "reduce", .grid = 1, .block = 96}, out.data());
    if (!status.ok()) return std::string(status.message);
    for (size_t i = 0; i < 96; i++) {
      if (out[i] != 1.0f) return "thread " + std::to_string(i) + " has a wrong result";
    }
    return std::string();
  });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("memory", ak::test::Seeds(argc, argv, 12));
  ak::test::global_memory(cases);
  ak::test::remembered_reads(cases);
  ak::test::shared_races(cases);
  ak::test::shared_words(cases);
  ak::test::shared_limits(cases);
  ak::test::atomics(cases);
  return cases.finish();
}
