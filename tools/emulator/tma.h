#pragma once
// device/tma.cuh on the emulator.
#include <cstddef>

#include "device/tensor_map.cuh"
#include "emulator/machine.h"

namespace ak {
namespace emu {

struct Box {
  int x, y, z, w = 0;
};
void tma_load(uint32_t to, const TensorMap& map, uint32_t barrier, Box at, uint32_t blocks);
void tma_prefetch(const TensorMap& map, Box at);
/// True if the last kernel has prefetched all `bytes` from `p` on.
bool prefetched(const void* p, std::size_t bytes);
void forget_prefetched();
void tma_store(const TensorMap& map, uint32_t from, Box at, bool add);
void bulk_commit();
void bulk_wait(uint32_t allowed, bool read_only);

}  // namespace emu

inline void prefetch_tensor_map(const TensorMap*) { emu::enter("prefetch_tensor_map"); }
inline void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w = 0) {
  emu::enter("tma_load");
  emu::tma_load(to, *map, barrier, {x, y, z, w}, 1u << emu::current->cta->rank);
}
inline void tma_load_multicast(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z,
                               uint16_t blocks) {
  emu::enter("tma_load_multicast");
  emu::tma_load(to, *map, barrier, {x, y, z}, blocks);
}
inline void tma_prefetch(const TensorMap* map, int x, int y, int z) {
  emu::enter("tma_prefetch");
  emu::tma_prefetch(*map, {x, y, z});
}
inline void tma_store(const TensorMap* map, uint32_t from, int x, int y, int z, int w = 0) {
  emu::enter("tma_store");
  emu::tma_store(*map, from, {x, y, z, w}, false);
}
inline void tma_reduce_add(const TensorMap* map, uint32_t from, int x, int y, int z) {
  emu::enter("tma_reduce_add");
  emu::tma_store(*map, from, {x, y, z}, true);
}
inline void bulk_commit() {
  emu::enter("bulk_commit");
  emu::bulk_commit();
}
template <int N>
void bulk_wait_read() {
  emu::enter("bulk_wait_read");
  emu::bulk_wait(N, true);
}
template <int N>
void bulk_wait() {
  emu::enter("bulk_wait");
  emu::bulk_wait(N, false);
}
inline void fence_proxy_async() {
  emu::enter("fence_proxy_async");
  emu::current->clock.proxy_fence();
}

}  // namespace ak
