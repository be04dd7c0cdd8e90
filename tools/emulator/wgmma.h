#pragma once
// device/wgmma.cuh on the emulator.
#include <type_traits>

#include "emulator/machine.h"

namespace ak {
namespace emu {

void wgmma_fence();
/// Issues `operation`, whose registers and group are set here.
void wgmma_issue(float* registers, const WgmmaOperation& operation);
void wgmma_commit();
void wgmma_wait(uint32_t allowed);

}  // namespace emu

template <class T, Major kA, Major kB, int kRegisters>
void wgmma(float (&d)[kRegisters], uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  static_assert(std::is_same_v<T, fp16> || std::is_same_v<T, bf16>, "wgmma takes fp16 or bf16");
  static_assert(kRegisters % 4 == 0 && kRegisters >= 4 && kRegisters <= 128, "N is 8 to 256 in steps of 8");
  emu::enter("wgmma");
  emu::WgmmaOperation operation{};
  operation.a = desc_a;
  operation.b = desc_b;
  operation.n = 2 * kRegisters;
  operation.a_mn_major = kA == Major::kMN;
  operation.b_mn_major = kB == Major::kMN;
  operation.fp16 = std::is_same_v<T, fp16>;
  operation.accumulate = accumulate;
  emu::wgmma_issue(d, operation);
}
inline void wgmma_fence() {
  emu::enter("wgmma_fence");
  emu::wgmma_fence();
}
template <int kRegisters>
void wgmma_pin(float (&)[kRegisters]) {}
inline void wgmma_commit() {
  emu::enter("wgmma_commit");
  emu::wgmma_commit();
}
template <int N>
void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  emu::enter("wgmma_wait");
  emu::wgmma_wait(N);
}

}  // namespace ak
