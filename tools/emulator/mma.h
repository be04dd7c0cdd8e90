#pragma once
// device/mma.cuh on the emulator, and the tensor core arithmetic shared with wgmma.
#include <span>
#include <type_traits>

#include "base/half.h"
#include "emulator/machine.h"

namespace ak {
namespace emu {

/// c + sum of a[i] b[i], as one tensor core step. Products of 16-bit floats are exact. By default the exact sum is
/// rounded once to fp32. With options().truncate_mma, addends are aligned to the largest exponent and truncated to 26
/// bits, 2 more than fp32 has, and the sum is truncated to fp32, as published for Hopper (FTTN, arXiv:2403.00232;
/// Khattak and Mikaitis, arXiv:2512.07004).
float tensor_core_sum(float c, std::span<const float> a, std::span<const float> b);

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, bool transpose);
void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4], bool transpose);
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bf16);

}  // namespace emu

template <class T>
uint32_t round_pair(float low, float high) {
  return round_to<T>(low).bits | static_cast<uint32_t>(round_to<T>(high).bits) << 16;
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  emu::enter("ldmatrix_x4");
  emu::ldmatrix_x4(r, row_address, false);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address, bool transposed) {
  emu::enter("ldmatrix_x4");
  emu::ldmatrix_x4(r, row_address, transposed);
}
inline void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  emu::enter("stmatrix_x4");
  emu::stmatrix_x4(row_address, r, false);
}
inline void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  emu::enter("stmatrix_x4_trans");
  emu::stmatrix_x4(row_address, r, true);
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, fp16> || std::is_same_v<T, bf16>, "mma takes fp16 or bf16");
  emu::enter("mma_m16n8k16");
  emu::mma(d, a, b, std::is_same_v<T, bf16>);
}

}  // namespace ak
