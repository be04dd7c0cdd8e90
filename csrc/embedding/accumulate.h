// Rows of gradients added to the rows of a table that they belong to.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// out[r] += sum of grad[order[i]] over the entries i with sorted[i] = r, in fp32, rounded once. `out` is rows x
/// columns, `grad` entries x columns, without gaps, each fp32, fp16 or bf16; `sorted` ascends. An entry of padding_idx,
/// or of no row at all, counts for nothing. by_frequency: the sum is divided by the number of its entries.
struct EmbeddingAccumulate {
  void* out;
  const void* grad;
  const int64_t *sorted, *order;
  float* partial;  // scratch: embedding_scratch_bytes(entries, columns)
  DType out_type, grad_type;
  int64_t rows, entries, columns, padding_idx;
  bool by_frequency;
};

/// The sorted entries are cut into pieces; the cuts depend on nothing but their number, and so do the bits of a result.
struct EmbeddingPieces {
  int64_t size, count;
};
inline EmbeddingPieces embedding_pieces(int64_t entries) {
  constexpr int64_t kSmallest = 16, kMost = 1024;
  const int64_t size = std::max(kSmallest, (entries + kMost - 1) / kMost);
  return {size, (entries + size - 1) / size};
}
/// Two rows of fp32 for each piece: the sums of the runs that it shares with the piece before and with the one behind.
inline size_t embedding_scratch_bytes(int64_t entries, int64_t columns) {
  return static_cast<size_t>(embedding_pieces(entries).count * columns) * 2 * sizeof(float);
}

Status embedding_accumulate(const EmbeddingAccumulate& problem, Stream stream);

}  // namespace ak
