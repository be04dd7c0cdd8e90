#pragma once
// device/mbarrier.cuh on the emulator.
#include "emulator/access.h"
#include "emulator/machine.h"

namespace ak {
namespace emu {

void mbarrier_init(uint32_t address, int arrivals);
void mbarrier_init_fence();
void mbarrier_arrive(uint32_t address, uint32_t cta, long bytes);
void mbarrier_wait(uint32_t address, int parity);

/// The barrier at `address & kWindow` in `cta`, for use by the running thread. `across`: use by the async proxy or
/// another CTA, which requires the init fence.
Barrier& barrier_at(Cta& cta, uint32_t address, bool across);
void complete_bytes(Cta& cta, uint32_t address, long bytes);

}  // namespace emu

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emu::enter("mbarrier_init");
  emu::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_init_fence() {
  emu::enter("mbarrier_init_fence");
  emu::mbarrier_init_fence();
}
inline void mbarrier_arrive(uint32_t barrier) {
  emu::enter("mbarrier_arrive");
  emu::mbarrier_arrive(barrier, static_cast<uint32_t>(emu::current->cta->rank), 0);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  emu::enter("mbarrier_arrive_expect_tx");
  emu::mbarrier_arrive(barrier, static_cast<uint32_t>(emu::current->cta->rank), bytes);
}
inline void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta) {
  emu::enter("mbarrier_arrive_cluster");
  emu::mbarrier_arrive(barrier, cta, 0);
}
inline void mbarrier_wait(uint32_t barrier, int parity) {
  emu::enter("mbarrier_wait");
  emu::mbarrier_wait(barrier, parity);
}

}  // namespace ak
