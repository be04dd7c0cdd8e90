// An fp32 master weight kept as the 16-bit weight the model uses and a 16-bit remainder, 4 bytes in all instead of 6.
//
// weight = the master rounded half away from zero; remainder = the lower half of the master's wide code
// (base/rounding.h) as a signed number, negative when the weight was rounded up. Joining adds the remainder back below
// the weight's last bit. Ties do not go to even: a tie rounded down would need a remainder of +0x8000, which an int16
// cannot hold; away from zero it is always -0x8000.
//
// Precision:
//   bf16: every finite value, both infinities and every quiet NaN, bit for bit (a signalling NaN comes back quiet).
//   fp16: bit for bit for 2^-17 <= |x| < 65536, zeros and infinities; below 2^-17 to the nearest multiple of 2^-40, an
//         error of at most 2^-41; finite values from 65536 on become inf; NaN stays NaN. The fp16 weight itself is
//         infinite from |x| >= 65520 on.
//
// With an 8-bit remainder ("split24", 3 bytes in all) the master is rounded stochastically to the upper 24 bits of its
// wide code: 16 significant bits in bf16, 19 in fp16. To nearest, changes of less than half a unit would be lost in
// every step; stochastically the mean of many steps is right. The remainder is then the upper byte of that above, whose
// lower byte is 0. All promises hold for masters of 24 bits.
//
// Source of the idea: the bf16 remainders of Apex's distributed Adam and Transformer Engine's FusedAdam; the fp16 form
// and the treatment of NaN are this project's.
#pragma once

#include "base/rounding.h"

namespace ak {

template <typename T>
struct SplitMaster {
  T weight;
  int16_t remainder;
};

namespace detail {

// A NaN is not rounded: the carry could run into the sign.
template <typename T>
AK_HD SplitMaster<T> split_code(uint32_t code, bool nan) {
  const uint32_t carry = nan ? 0u : 0x8000u;
  return {T{static_cast<uint16_t>((code + carry) >> 16)}, static_cast<int16_t>(static_cast<uint16_t>(code))};
}

}  // namespace detail

template <typename T>
AK_HD SplitMaster<T> split_master(float x) {
  return detail::split_code<T>(wide_code<T>(x), is_nan(x));
}

// The master rounded to 24 bits; the lower byte of the remainder is 0. `random` has 8 bits. Every NaN becomes the same.
template <typename T>
AK_HD SplitMaster<T> split_master24(float x, uint32_t random) {
  const uint32_t quiet = wide_code<T>(float_of(0x7fc00000u));
  const uint32_t code = x != x ? quiet : wide_code_of_number<T>(x) + random;
  return {T{static_cast<uint16_t>((code + 0x8000u) >> 16)},
          static_cast<int16_t>(static_cast<uint16_t>(code & 0xff00u))};
}

// A split never gives a zero weight with a negative remainder, but a weight that was set to zero later (a pruning mask)
// may keep its old remainder: it stays zero, not the NaN below zero's code.
template <typename T>
AK_HD float join_master(T weight, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(weight.bits) << 16;
  const int32_t valid = (upper << 1) == 0 && remainder < 0 ? 0 : remainder;
  const uint32_t borrow = is_nan(weight) ? static_cast<uint16_t>(remainder) : static_cast<uint32_t>(valid);
  return from_wide_code<T>(upper + borrow);
}

// The same for the upper byte of a remainder. A zero with a negative remainder stays zero here, too: it would give one
// of the upper codes, which no other weight gives. A NaN stays one with any remainder.
template <typename T>
AK_HD float join_master(T weight, int8_t upper_remainder) {
  const uint32_t upper = static_cast<uint32_t>(weight.bits) << 16;
  const uint32_t code = upper + static_cast<uint32_t>(upper_remainder * 256);
  return from_wide_code<T>(code << 1 >= 0xffff0000u ? upper : code);
}

}  // namespace ak
