// The call of embedding_accumulate_: rows of gradients added to the rows of a table.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "device/status.h"

namespace ak {

/// out[r] += sum of grad[order[i]] over the entries i with sorted[i] = r, in fp32, rounded once. `out` is rows x
/// columns, `grad` entries x columns, both dense, each fp32, fp16 or bf16; `sorted` ascends. An entry of padding_idx or
/// out of range is ignored. by_frequency: the sum is divided by the number of its entries. in_order, of an fp32 `out`
/// and without by_frequency: entry after entry is added to out[r] itself, so that a call for each part of the entries
/// gives the bits of one call for all.
struct EmbeddingAccumulate {
  void* out;
  const void* grad;
  const int64_t *sorted, *order;
  float* partial;  // scratch of embedding_scratch_bytes(entries, columns); the CPU needs none
  DType out_type, grad_type;
  int64_t rows, entries, columns, padding_idx;
  bool by_frequency, in_order;
};

/// The sorted entries are cut into pieces. The cuts depend on the number of entries alone, and so the bits do too.
/// Above a million entries there are as many pieces as each has entries: fp32 adds these and those of a long run in
/// order.
struct EmbeddingPieces {
  int64_t size, count;
};
inline EmbeddingPieces embedding_pieces(int64_t entries) {
  constexpr int64_t kSmallest = 16, kMost = 1024;
  const int64_t most = std::max(kMost, static_cast<int64_t>(std::sqrt(static_cast<double>(entries))));
  const int64_t size = std::max(kSmallest, (entries + most - 1) / most);
  return {size, (entries + size - 1) / size};
}
/// Two rows of fp32 for each piece: the sums of the runs that it shares with the previous and with the next piece.
inline size_t embedding_scratch_bytes(int64_t entries, int64_t columns) {
  return static_cast<size_t>(embedding_pieces(entries).count * columns) * 2 * sizeof(float);
}

Status embedding_accumulate(const EmbeddingAccumulate& call, Stream stream);

}  // namespace ak
