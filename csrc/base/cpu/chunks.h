// Cuts a list of tensors into chunks. Their bounds depend on the tensors alone, so results assembled per chunk are the
// same for any number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ak {

inline constexpr int64_t kChunk = 16384;  // elements; small enough to balance two tensors over many threads
inline constexpr int64_t kGrain = 65536;  // elements per thread, below which threads do not pay off

struct Chunk {
  int64_t tensor, begin, end;
};

// The chunks of a list whose entries have a `numel`.
template <typename List>
std::vector<Chunk> make_chunks(const List& entries) {
  std::vector<Chunk> chunks;
  chunks.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t numel = entries[i].numel;
    for (int64_t begin = 0; begin < numel; begin += kChunk)
      chunks.push_back({static_cast<int64_t>(i), begin, std::min(begin + kChunk, numel)});
  }
  return chunks;
}

// Calls work(index, chunk) for every chunk, in parallel. `work` must not throw.
template <typename Work>
void for_each_chunk(const std::vector<Chunk>& chunks, const Work& work) {
  if (chunks.empty()) return;
  int64_t elements = 0;
  for (const Chunk& c : chunks) elements += c.end - c.begin;
  const int64_t count = static_cast<int64_t>(chunks.size());
  const int64_t grain = std::max<int64_t>(1, count * kGrain / std::max<int64_t>(1, elements));
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i, chunks[static_cast<size_t>(i)]);
  });
}

}  // namespace ak
