// All 2^32 fp32 codes, split and joined, by all cores: the proof of csrc/base/split_master.h in a few seconds.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/cpu/simd.h"
#include "base/half.h"
#include "base/split_master.h"

namespace ak {
namespace {

// 1 if csrc/base/split_master.h keeps its promises for one fp32 code, else 0. Every case is computed and one
// chosen, so that the loop over all codes is vectorised.
template <typename T>
AK_HD uint32_t split_is_right(uint32_t code);

template <>
AK_HD uint32_t split_is_right<bf16>(uint32_t code) {
  const float x = float_of(code);
  const SplitMaster<bf16> s = split_master<bf16>(x);
  const uint32_t back = bits_of(join_master(s.weight, s.remainder));
  const uint32_t expected = is_nan(x) ? code | 0x00400000u : code;
  return uint32_t{back == expected} & uint32_t{is_nan(s.weight) == is_nan(x)};
}

template <>
AK_HD uint32_t split_is_right<fp16>(uint32_t code) {
  const float x = float_of(code);
  const SplitMaster<fp16> s = split_master<fp16>(x);
  const float back = join_master(s.weight, s.remainder);
  const uint32_t sign = code & 0x80000000u, magnitude = code & 0x7fffffffu;
  const uint32_t weight = s.weight.bits & 0x7fffu;
  const uint32_t close =
      uint32_t{(bits_of(back) & 0x80000000u) == sign} & uint32_t{bits_of(abs(back - x)) <= bits_of(0x1p-41f)};
  const uint32_t exact =
      uint32_t{bits_of(back) == code} & uint32_t{(weight == 0x7c00u) == (magnitude >= 0x477ff000u)};  // 65520
  const uint32_t overflow = uint32_t{bits_of(back) == (sign | 0x7f800000u)} & uint32_t{weight == 0x7c00u};
  const uint32_t nan = uint32_t{is_nan(back)} & uint32_t{weight > 0x7c00u};
  const uint32_t finite = magnitude < 0x37000000u ? close : exact;      // 2^-17
  const uint32_t number = magnitude < 0x47800000u ? finite : overflow;  // 65536
  return magnitude <= 0x7f800000u ? number : nan;
}

template <typename T>
AK_SIMD_CLONES uint32_t count_broken(uint32_t first, uint32_t count) {
  uint32_t broken = 0;
  for (uint32_t i = 0; i < count; ++i) broken += 1u - split_is_right<T>(first + i);
  return broken;
}

/// The codes for which it breaks one.
template <class T>
uint64_t count_broken_splits() {
  constexpr uint32_t kBlock = 1u << 20;
  std::atomic<uint64_t> broken{0};
  std::atomic<uint32_t> next{0};
  const auto work = [&] {
    for (uint32_t block; (block = next++) < (1ull << 32) / kBlock;) broken += count_broken<T>(block * kBlock, kBlock);
  };
  std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
  for (std::thread& t : threads) t = std::thread(work);
  for (std::thread& t : threads) t.join();
  return broken.load();
}

}  // namespace
}  // namespace ak
