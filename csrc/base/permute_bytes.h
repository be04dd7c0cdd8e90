#pragma once
#include "base/config.h"

namespace ak {

// Four of the eight bytes of `a`, the lower ones, and `b`: one for each hexadecimal digit of `selector`.
AK_HD uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
#endif
}

}  // namespace ak
