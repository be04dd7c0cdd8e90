// Philox4x32-10, a counter-based random number generator. Numbers are a pure function of (counter, key), so every
// thread, rank and backend computes the same ones without state. Source: Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011.
#pragma once

#include <bit>

#include "base/config.h"

namespace ak {

struct Philox4 {
  uint32_t word[4];
};

AK_HD Philox4 philox_round(const Philox4& counter, uint32_t key0, uint32_t key1) {
  const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
  const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
  return {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
           static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
}

AK_HD Philox4 philox4x32_10(Philox4 counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    counter = philox_round(counter, key0, key1);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The keys of the ten rounds, for a kernel that takes them as an argument: in constant memory they cost no instruction.
struct PhiloxKeys {
  uint32_t word[20];

  PhiloxKeys() = default;
  explicit PhiloxKeys(uint64_t key) {
    for (uint32_t round = 0; round < 10; ++round) {
      word[2 * round] = static_cast<uint32_t>(key) + round * 0x9E3779B9u;
      word[2 * round + 1] = static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85u;
    }
  }
};

AK_HD Philox4 philox4x32_10(Philox4 counter, const PhiloxKeys& keys) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    counter = philox_round(counter, keys.word[2 * round], keys.word[2 * round + 1]);
  }
  return counter;
}

// Random bits for stochastic rounding: eight 16-bit numbers per call, for elements 8 * group .. 8 * group + 7 of
// parameter `param` at step `step`. They depend on the element alone, not on who computes it, so sharded and restarted
// runs round identically. `seed`: a number, or its PhiloxKeys.
template <typename Seed>
AK_HD Philox4 rounding_bits(const Seed& seed, uint32_t step, uint32_t param, uint64_t group) {
  return philox4x32_10({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), param, step}}, seed);
}

// The random bits of a parameter, or of a piece of one. Group q of a piece is group(q) of the parameter: `first` + q if
// its elements are consecutive; a piece within rows skips `gap` groups after each of its rows.
struct RandomPlace {
  uint64_t first;
  uint32_t index;  // the parameter's number
  uint32_t gap, reciprocal, shift;

  AK_HD uint64_t group(uint64_t q) const {
    const uint64_t product = uint64_t{static_cast<uint32_t>(q)} * reciprocal;
    return first + q + uint64_t{static_cast<uint32_t>(product >> 32) >> shift} * gap;
  }
};

// Of a piece whose rows have `width` groups, of the `pitch` that the parameter's rows have; both are equal for
// consecutive elements. Divides q < 2^31 by a width of 2 and more with a product (Granlund and Montgomery, "Division by
// invariant integers using multiplication", PLDI 1994): what the reciprocal is too large by, less than 2^-31 of it, is
// less than a unit of the quotient.
inline RandomPlace random_place(uint32_t index, uint64_t first, uint32_t width, uint32_t pitch) {
  if (width == pitch) return {first, index, 0, 0, 0};
  const uint32_t shift = static_cast<uint32_t>(std::bit_width(width - 1)) - 1;
  const uint64_t reciprocal = ((uint64_t{1} << (32 + shift)) + width - 1) / width;
  return {first, index, pitch - width, static_cast<uint32_t>(reciprocal), shift};
}

// The number of element `lane` (0..7) of the eight, times kScale, 1 or 256, for one of its values: 0 is the weight,
// 1 + k moment k in 8 bits. All values share one call. The words change places between them, so the values of an
// element have independent bits, and so have the elements of a value.
template <uint32_t kScale = 1>
AK_HD uint32_t random16(const Philox4& bits, int lane, int value) {
  const uint32_t word = bits.word[lane >> 1 ^ value];
#if defined(__CUDA_ARCH__)  // one prmt, which the compiler does not find
  return __byte_perm(word, 0, (kScale == 256 ? 0x4104u : 0x4410u) + (lane & 1) * (kScale == 256 ? 0x220u : 0x22u));
#else
  return (word >> 16 * (lane & 1) & 0xffffu) * kScale;
#endif
}

}  // namespace ak
