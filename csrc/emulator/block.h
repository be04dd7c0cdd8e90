#pragma once
// device/block.cuh on the emulator.
#include "emulator/machine.h"

namespace ak {

inline void block_sync() {
  emu::enter("block_sync");
  emu::meet(emu::current->cta->all, emu::machine->shape.block, true);
}
inline bool block_any(bool predicate) {
  emu::enter("block_any");
  emu::Cta& cta = *emu::current->cta;
  const int vote = cta.vote;  // the same for all: it changes when the last one has come
  cta.any[vote] |= predicate;
  emu::meet(cta.all, emu::machine->shape.block, true, [&] {
    cta.vote = 1 - vote;
    cta.any[cta.vote] = false;
  });
  return cta.any[vote];
}
inline void named_barrier(int id, int threads) {
  emu::enter("named_barrier");
  if (id < 1 || id > 15) emu::fail(emu::format("id = %d, barriers 1 to 15 are accepted", id));
  if (threads % 32 != 0) emu::fail(emu::format("threads = %d, a multiple of 32 is accepted", threads));
  emu::meet(emu::current->cta->named[id], threads, true);
}

}  // namespace ak
