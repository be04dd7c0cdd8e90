#pragma once
// device/cluster.cuh on the emulator.
#include "emulator/machine.h"

namespace ak {

inline uint32_t cluster_rank() { return static_cast<uint32_t>(emu::current->cta->rank); }
inline void cluster_sync() {
  emu::enter("cluster_sync");
  emu::Cluster& cluster = *emu::current->cta->cluster;
  emu::meet(cluster.meeting, emu::machine->shape.block * emu::machine->shape.cluster, true);
}

}  // namespace ak
