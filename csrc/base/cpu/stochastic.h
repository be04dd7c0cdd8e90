// Random bits of a tile, and stochastic rounding of a tile to a 16-bit tensor (base/rounding.h).
#pragma once

#include "base/cpu/tile.h"

namespace ak {

// The key of a tensor's random bits (base/philox.h).
struct RandomKey {
  uint64_t seed;
  uint32_t step, index;
  uint64_t first_group = 0;  // that of element 0
  uint32_t stream = 0;
};

// 16 random bits for each of the elements [at, at + n) of a tensor; `at` is a multiple of 8, and `random` has room for a
// tile.
void random_numbers(uint32_t* random, int64_t at, int64_t n, const RandomKey& key);

// Elements [at, at + n) of an fp16 or bf16 tensor, rounded with random bits of their own; `at` is a multiple of 8.
void store_stochastic(const float* tile, void* data, DType dtype, int64_t at, int64_t n, const RandomKey& key);

}  // namespace ak
