#pragma once
// device/cluster.cuh on the emulator.
#include "emulator/machine.h"

namespace ak {
namespace emu {

void store_cluster_2(uint32_t address, uint32_t barrier, uint32_t cta, float x, float y);

}  // namespace emu

inline uint32_t cluster_rank() { return static_cast<uint32_t>(emu::current->cta->rank); }
inline void cluster_sync() {
  emu::enter("cluster_sync");
  emu::Cluster& cluster = *emu::current->cta->cluster;
  emu::meet(cluster.meeting, emu::machine->shape.block * emu::machine->shape.cluster, true);
}
inline void store_cluster_2(uint32_t address, uint32_t barrier, uint32_t cta, float x, float y) {
  emu::enter("store_cluster_2");
  emu::store_cluster_2(address, barrier, cta, x, y);
}

}  // namespace ak
