// State of one byte an element in the models of the optimizer kernels: 8-bit moments and remainders of 24-bit masters.
#pragma once
#include "base/block8.h"
#include "base/philox.h"
#include "tensor_lists.h"
#include "update/rule.h"

namespace ak::test {

using Bytes = emu::Buffer<uint8_t>;

/// Bytes that a kernel must leave, and those that were there.
struct KnownBytes {
  std::unique_ptr<Bytes> buffer;
  std::vector<uint8_t> expected;

  void expect_the_same() {
    expected.resize(buffer->size());
    for (size_t i = 0; i < expected.size(); i++) expected[i] = (*buffer)[i];
  }
};

/// One moment in 8 bits, its exponents in memory of their own.
struct Moment8 {
  bool is_unsigned;
  KnownBytes codes, exponents;

  float get(size_t i) const {
    const uint32_t code = (*codes.buffer)[i], exponent = (*exponents.buffer)[i / kBlock8];
    return is_unsigned ? block8_decode<UnsignedCode8>(code, exponent) : block8_decode<SignedCode8>(code, exponent);
  }
  float get_expected(size_t i) const {
    const uint32_t code = codes.expected[i], exponent = exponents.expected[i / kBlock8];
    return is_unsigned ? block8_decode<UnsignedCode8>(code, exponent) : block8_decode<SignedCode8>(code, exponent);
  }
  /// `random(i)`: 16 bits of element i.
  template <class Random>
  void expect(const std::vector<float>& values, const Random& random) {
    if (is_unsigned) {
      expect_codes<UnsignedCode8>(values, random);
    } else {
      expect_codes<SignedCode8>(values, random);
    }
  }

 private:
  template <class Code, class Random>
  void expect_codes(const std::vector<float>& values, const Random& random) {
    codes.expected.resize(values.size());
    exponents.expected.resize((values.size() + kBlock8 - 1) / kBlock8);
    for (size_t b = 0; b < exponents.expected.size(); b++) {
      const size_t begin = b * kBlock8, end = std::min(values.size(), begin + kBlock8);
      uint32_t largest = 0;
      for (size_t i = begin; i < end; i++) largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);
      const uint32_t exponent = block8_exponent<Code>(largest);
      exponents.expected[b] = static_cast<uint8_t>(exponent);
      for (size_t i = begin; i < end; i++) codes.expected[i] = block8_encode<Code>(values[i], exponent, random(i));
    }
  }
};

/// A parameter, or a piece of it that has `width` of every `pitch` groups of eight elements; all of them for a width of
/// 0.
struct Place {
  uint32_t index;
  uint64_t first_group, width = 0, pitch = 0;

  RandomPlace random() const {
    return random_place(index, first_group, static_cast<uint32_t>(width), static_cast<uint32_t>(pitch));
  }
};

/// The 16 random bits with which a value of element `i` of a piece is rounded at `step`, as the ops promise them. Value
/// 0 is the weight, 1 + k moment k.
inline uint32_t random_value(uint64_t seed, const Place& place, uint32_t step, uint64_t i, uint32_t value) {
  const uint64_t q = i / 8;
  const uint64_t call = place.first_group + (place.width == 0 ? q : q / place.width * place.pitch + q % place.width);
  const uint32_t high = static_cast<uint32_t>(call >> 32);
  const Philox4 words = philox4x32_10({{static_cast<uint32_t>(call), high, place.index, step}}, seed);
  const uint32_t word = words.word[(i % 8 / 2) ^ value];
  return i % 2 ? word >> 16 : word & 0xffff;
}

}  // namespace ak::test
