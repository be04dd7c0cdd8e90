// Random bits of a tile, and stochastic rounding of a tile to a 16-bit tensor (base/rounding.h).
#pragma once

#include "base/cpu/tile.h"
#include "base/philox.h"

namespace ak {

// The key of a tensor's random bits (base/philox.h).
struct RandomKey {
  uint64_t seed;
  uint32_t step;
  RandomPlace place;
};

// The random bits of elements [at, at + n) of a tensor, a tile at most, drawn when they are first asked for. `at` is a
// multiple of 8.
class TileNumbers {
 public:
  TileNumbers(const RandomKey& key, int64_t at, int64_t n) : key_(key), at_(at), n_(n) {}

  // 16 bits for each element, those of one value (base/philox.h); until the next call.
  const uint16_t* of(int value) { return of(value, 0, n_); }
  // The same for elements [first, first + n) of the tile; `first` is a multiple of 8.
  const uint16_t* of(int value, int64_t first, int64_t n);

 private:
  RandomKey key_;
  int64_t at_, n_;
  bool drawn_ = false;
  alignas(64) uint16_t of_weight_[kTile], of_moment_[kTile];
};

// Elements [at, at + n) of an fp16 or bf16 tensor, rounded with the numbers of a weight.
void store_stochastic(const float* tile, void* data, DType dtype, int64_t at, int64_t n, TileNumbers& numbers);

}  // namespace ak
