#include "device/wgmma.cuh"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulator/access.h"
#include "emulator/mma.h"
#include "emulator/proxy.h"

namespace ak::emu {
namespace {

constexpr int kGroupThreads = 128, kM = 64, kK = 16;

/// Operand layout, decoded from its descriptor.
struct Operand {
  uint32_t start, leading, stride, row;
  Swizzle swizzle;
  bool mn_major;
  int rows;  // m or n

  Operand(uint64_t descriptor, bool mn, int count) : mn_major(mn), rows(count) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    start = field(0);
    leading = field(16);
    stride = field(32);
    const int mode = static_cast<int>(descriptor >> 62);
    if (mode == 0) fail("a descriptor without swizzle is not modelled");
    swizzle = mode == 1 ? Swizzle::k128 : mode == 2 ? Swizzle::k64 : Swizzle::k32;
    row = row_bytes(swizzle);
    // The swizzle uses address bits from 7 up as the row index, so the start must be aligned, except for k steps within
    // a K-major row.
    const uint32_t pattern = 8 * row, inside = mn ? 0 : row - 1;
    if (start & (pattern - 1) & ~inside)
      fail(format("the descriptor's start 0x%x is not where the swizzle pattern starts", start));
    if (!mn && (start & inside) + 2 * kK > row)
      fail(format("16 elements of k from 0x%x on do not fit into one row of the swizzle", start));
  }

  /// Calls visit(shared address, index, k) for every 8 contiguous elements, along k or along the index.
  template <class Visit>
  void for_each_chunk(Visit visit) const {
    for (int i = 0; i < rows; i += mn_major ? 8 : 1) {
      for (int k = 0; k < kK; k += mn_major ? 1 : 8) {
        const auto I = static_cast<uint32_t>(i), K = static_cast<uint32_t>(k), per_row = row / 2;
        const uint32_t address = mn_major
                                     ? start + I / per_row * leading + K / 8 * stride + K % 8 * row + I % per_row * 2
                                     : start + I / 8 * stride + I % 8 * row + K * 2;
        visit(swizzled(address, swizzle), i, k);
      }
    }
  }
};

float element(const Cta& cta, uint32_t offset, bool is_fp16) {
  uint16_t bits;
  std::memcpy(&bits, &cta.shared[offset], 2);
  return is_fp16 ? to_float(fp16{bits}) : to_float(bf16{bits});
}

/// Checks at issue that the operand is ordered before for every thread of the warpgroup, and records the read.
void claim_operand(Cta& cta, const Warpgroup& group, const Operand& operand, uint32_t epoch) {
  uint32_t low = ~0u, high = 0;
  std::vector<Access> writers;  // few: a TMA load, or the threads that wrote the tile
  operand.for_each_chunk([&](uint32_t address, int, int) {
    const uint32_t offset = shared_offset(cta, address, 16);
    low = std::min(low, offset);
    high = std::max(high, offset + 16);
    for (uint32_t i = offset; i < offset + 16; i += kGranule) {
      const Access write = cta.shadow->last_write(i);
      if (!writers.empty() && writers.back() == write) continue;
      if (std::find(writers.begin(), writers.end(), write) != writers.end()) continue;
      for (int t = 0; t < kGroupThreads; t++) {
        check_async_read(cta, i, cta.threads[static_cast<std::size_t>(group.index * kGroupThreads + t)]->clock);
      }
      writers.push_back(write);
    }
  });
  note_async_read(cta, {low, high, group.actor, epoch});
}

/// Row and column of register j of thread t.
struct Place {
  int row, column;
};
Place place_of(int t, int j) { return {t / 32 * 16 + t % 32 / 4 + j / 2 % 2 * 8, j / 4 * 8 + t % 4 * 2 + j % 2}; }

template <class Visit>
void for_each_register(int n, Visit visit) {
  for (int t = 0; t < kGroupThreads; t++) {
    for (int j = 0; j < n / 2; j++) {
      const Place p = place_of(t, j);
      visit(t, j, static_cast<std::size_t>(p.row * n + p.column));
    }
  }
}

Warpgroup& my_warpgroup() {
  Cta& cta = *current->cta;
  const auto index = static_cast<std::size_t>(current->index / kGroupThreads);
  if ((index + 1) * kGroupThreads > cta.threads.size()) fail("the last warpgroup of the block is not complete");
  return *cta.warpgroups[index];
}

}  // namespace

void wgmma_fence() { current->wgmma_fenced = true; }

void wgmma_issue(float* registers, const WgmmaOperation& operation) {
  Warpgroup& group = my_warpgroup();
  if (group.meeting.arrived == 0) {
    group.next = operation;
  } else if (group.next.a != operation.a || group.next.b != operation.b || group.next.n != operation.n ||
             group.next.accumulate != operation.accumulate) {
    fail("the threads of the warpgroup do not agree on the descriptors");
  }
  const int thread = current->index % kGroupThreads;
  group.next.registers[thread] = registers;
  meet(group.meeting, kGroupThreads, false, [&group] {
    WgmmaOperation op = group.next;
    op.group = group.committed + 1;
    Cta& cta = *group.cta;
    claim_operand(cta, group, Operand(op.a, op.a_mn_major, kM), op.group);
    claim_operand(cta, group, Operand(op.b, op.b_mn_major, op.n), op.group);
    auto [it, fresh] = group.in_flight.try_emplace(op.registers[0]);
    Warpgroup::Accumulator& accumulator = it->second;
    accumulator.last_group = op.group;
    if (fresh) {
      for (int t = 0; t < kGroupThreads; t++) {
        if (!cta.threads[static_cast<std::size_t>(group.index * kGroupThreads + t)]->wgmma_fenced) {
          fail("no wgmma_fence() since the accumulator registers last belonged to the threads");
        }
      }
      // NaN until the covering wait.
      accumulator.n = op.n;
      accumulator.values.resize(static_cast<std::size_t>(kM * op.n));
      std::copy(std::begin(op.registers), std::end(op.registers), accumulator.registers);
      for_each_register(op.n, [&](int t, int j, std::size_t i) {
        accumulator.values[i] = op.registers[t][j];
        op.registers[t][j] = NAN;
      });
    } else if (accumulator.n != op.n) {
      fail("wgmma of different shapes share accumulator registers with no wait between");
    }
    group.queue.push_back(op);
    group.open = true;
  });
}

void wgmma_commit() {
  Warpgroup& group = my_warpgroup();
  meet(group.meeting, kGroupThreads, false, [&group] {
    group.committed++;
    group.open = false;
  });
}

void wgmma_wait(uint32_t allowed) {
  Warpgroup& group = my_warpgroup();
  meet(group.meeting, kGroupThreads, false, [&group, allowed] {
    if (group.open) fail("wgmma operations were issued but not committed, so this wait does not cover them");
    if (group.committed <= allowed) return;
    const uint32_t finished = group.committed - allowed;
    while (!group.queue.empty() && group.queue.front().group <= finished) group.run_one();
    const Knowledge news = with(nullptr, group.actor, finished);
    bool returned = false;
    std::erase_if(group.in_flight, [&](const auto& entry) {
      const Warpgroup::Accumulator& accumulator = entry.second;
      if (accumulator.last_group > finished) return false;
      for_each_register(accumulator.n,
                        [&](int t, int j, std::size_t i) { accumulator.registers[t][j] = accumulator.values[i]; });
      return returned = true;
    });
    for (int t = 0; t < kGroupThreads; t++) {
      Thread& thread = *group.cta->threads[static_cast<std::size_t>(group.index * kGroupThreads + t)];
      thread.clock.acquire(news);
      if (returned) thread.wgmma_fenced = false;
    }
  });
}

void Warpgroup::run_one() {
  const WgmmaOperation op = queue.front();
  queue.pop_front();
  const auto n = static_cast<std::size_t>(op.n);
  std::vector<float>& d = in_flight.at(op.registers[0]).values;
  float a[kM][kK];
  std::vector<float> b(n * kK);  // [n][k]
  Operand(op.a, op.a_mn_major, kM).for_each_chunk([&](uint32_t address, int i, int k) {
    const uint32_t offset = shared_offset(*cta, address, 16);
    for (int e = 0; e < 8; e++)
      a[op.a_mn_major ? i + e : i][op.a_mn_major ? k : k + e] =
          element(*cta, offset + 2 * static_cast<uint32_t>(e), op.fp16);
  });
  Operand(op.b, op.b_mn_major, op.n).for_each_chunk([&](uint32_t address, int i, int k) {
    const uint32_t offset = shared_offset(*cta, address, 16);
    for (int e = 0; e < 8; e++) {
      const int row = op.b_mn_major ? i + e : i, column = op.b_mn_major ? k : k + e;
      b[static_cast<std::size_t>(row * kK + column)] = element(*cta, offset + 2 * static_cast<uint32_t>(e), op.fp16);
    }
  });
  if (!op.accumulate) std::fill(d.begin(), d.end(), 0.0f);
  for (std::size_t i = 0; i < kM; i++) {
    for (std::size_t j = 0; j < n; j++) d[i * n + j] = tensor_core_sum(d[i * n + j], a[i], {&b[j * kK], kK});
  }
}

}  // namespace ak::emu
