// The emulator's own tests, part 5: cp.async.
#include "base/config.h"
#include "device/async_copy.cuh"
#include "device/block.cuh"
#include "emulator/harness.h"

namespace ak::test {
namespace {

enum class CopyBug { kNone, kNoWait, kWaitForOlder, kNoCommit, kNoSync };

/// Copies n floats through shared memory in pieces of kBytes, two groups in flight; short pieces are filled with zeros.
template <int kBytes, CopyBug kBug>
AK_KERNEL(32, 1)
staged_kernel(const float* from, float* to, int n) {
  constexpr int kEach = kBytes / 4, kRound = 32 * kEach;
  const uint32_t ring = dynamic_shared();
  const int t = thread_index(), rounds = (n + kRound - 1) / kRound;
  const auto request = [&](int round) {
    const int i = round * kRound + t * kEach, left = n - i < 0 ? 0 : n - i < kEach ? n - i : kEach;
    const uint32_t slot = ring + static_cast<uint32_t>(round % 2 * kRound * 4 + t * kBytes);
    if (round < rounds) copy_async<kBytes>(slot, left > 0 ? from + i : from, left * 4);
    if (kBug != CopyBug::kNoCommit) copy_commit();
  };
  request(0);
  for (int round = 0; round < rounds; round++) {
    request(round + 1);
    if (kBug != CopyBug::kNoWait) copy_wait<kBug == CopyBug::kWaitForOlder ? 2 : 1>();
    if (kBug != CopyBug::kNoSync) warp_sync();
    const auto values = shared_at<float>(ring + static_cast<uint32_t>(round % 2 * kRound * 4));
    for (int e = 0; e < kEach; e++) {
      const int i = (t * kEach + e * 5) % kRound;  // mostly other lanes' copies
      store(to + round * kRound + i, static_cast<float>(values[i]));
    }
    warp_sync();
  }
  copy_wait<0>();
}

template <int kBytes, CopyBug kBug>
std::string staged() {
  constexpr int kRound = 8 * kBytes;
  emu::Buffer<float> from("from", 301), to("to", static_cast<size_t>((301 + kRound - 1) / kRound * kRound));
  for (size_t i = 0; i < 301; i++) from.set(i, static_cast<float>(i));
  const LaunchConfig config{.name = "staged", .grid = 1, .block = 32, .shared_bytes = 2 * 32 * kBytes};
  const Status status = launch(staged_kernel<kBytes, kBug>, config, from.data(), to.data(), 301);
  if (!status.ok()) return status.message;
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i] == to[i] && to[i] != (i < 301 ? static_cast<float>(i) : 0.0f)) return "wrong value";
  }
  return to[300] == 300.0f ? "" : "not copied";
}

void copies(Cases& cases) {
  cases.check("4 bytes", [] { return staged<4, CopyBug::kNone>(); });
  cases.check("8 bytes", [] { return staged<8, CopyBug::kNone>(); });
  cases.check("16 bytes", [] { return staged<16, CopyBug::kNone>(); });
  cases.check_fails("no wait", "written by a cp.async", [] { return staged<16, CopyBug::kNoWait>(); });
  cases.check_fails("waits for one group too few", "written by a cp.async",
                    [] { return staged<16, CopyBug::kWaitForOlder>(); });
  cases.check_fails("no commit", "cp.async", [] { return staged<16, CopyBug::kNoCommit>(); });
  cases.check_fails("other lanes' copies without a barrier", "read of shared memory",
                    [] { return staged<16, CopyBug::kNoSync>(); });
}

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  ak::test::Cases cases("copies", ak::test::Seeds(argc, argv, 24));
  ak::test::copies(cases);
  return cases.finish();
}
