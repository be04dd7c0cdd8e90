#pragma once
// device/block.cuh on the emulator.
#include "emulator/machine.h"

namespace ak {

inline void block_sync() {
  emu::enter("block_sync");
  emu::meet(emu::current->cta->all, emu::machine->shape.block, true);
}
namespace emu {

inline Rendezvous& named_barrier(int id, int threads) {
  enter("named_barrier");  // both functions use the same barrier
  if (id < 1 || id > 15) fail(format("id = %d, barriers 1 to 15 are accepted", id));
  if (threads % 32 != 0) fail(format("threads = %d, a multiple of 32 is accepted", threads));
  return current->cta->named[id];
}

}  // namespace emu

inline void named_barrier(int id, int threads) { emu::meet(emu::named_barrier(id, threads), threads, true); }
inline void named_barrier_arrive(int id, int threads) { emu::come(emu::named_barrier(id, threads), threads); }

}  // namespace ak
