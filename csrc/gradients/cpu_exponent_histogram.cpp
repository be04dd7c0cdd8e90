// exponent_histogram on the CPU. Reads every element once.
//
// One loop computes the bins of a tile, so that it vectorises, and another counts them. Neighbours mostly share a bin,
// and an increment that depends on the previous one takes some five cycles, so four sets of counters take turns.
#include <algorithm>
#include <array>

#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gradients/call.h"
#include "gradients/exponent.h"
#include "gradients/grad_norm.h"

namespace ak {
namespace {

constexpr int64_t kSets = 4;

float narrowed(fp16 x) { return to_float(x); }
float narrowed(bf16 x) { return to_float(x); }
float narrowed(float x) { return x; }
float narrowed(double x) { return static_cast<float>(x); }

struct Histogram {
  std::array<uint32_t, kExponentBins> counts = {};
  uint32_t largest = 0;
};

template <typename T>
AK_SIMD_CLONES uint32_t bins_of_span(const T* __restrict x, uint16_t* __restrict bins, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = magnitude_bits(narrowed(x[i]));
    const uint32_t finite = magnitude < 0x7f800000u ? magnitude : 0u;
    bins[i] = static_cast<uint16_t>(exponent_bin(magnitude));
    largest = finite > largest ? finite : largest;
  }
  return largest;
}

template <typename T>
Histogram chunk_histogram(const void* data, const Chunk& chunk) {
  Histogram sets[kSets];
  uint16_t bins[kTile];
  for (int64_t at = chunk.begin; at < chunk.end; at += kTile) {
    const int64_t n = std::min(kTile, chunk.end - at);
    sets[0].largest = std::max(sets[0].largest, bins_of_span(static_cast<const T*>(data) + at, bins, n));
    for (int64_t i = 0; i < n; ++i) sets[i % kSets].counts[bins[i]]++;
  }
  for (int64_t set = 1; set < kSets; ++set) {
    for (size_t bin = 0; bin < kExponentBins; ++bin) sets[0].counts[bin] += sets[set].counts[bin];
  }
  return sets[0];
}

}  // namespace

Status exponent_histogram(std::span<const GradRef> tensors, uint64_t* counts, uint32_t* largest, Stream) {
  const std::vector<Chunk> chunks = make_chunks(tensors);
  std::vector<Histogram> partials(chunks.size());
  for_each_chunk(chunks, [&](int64_t index, const Chunk& chunk) {
    const GradRef& tensor = tensors[static_cast<size_t>(chunk.tensor)];
    partials[static_cast<size_t>(index)] =
        with_dtype(tensor.dtype, [&]<typename T>(T) { return chunk_histogram<T>(tensor.data, chunk); });
  });
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t tensor = chunks[i].tensor;
    for (int64_t bin = 0; bin < kExponentBins; ++bin) {
      counts[tensor * kExponentBins + bin] += partials[i].counts[static_cast<size_t>(bin)];
    }
    largest[tensor] = std::max(largest[tensor], partials[i].largest);
  }
  return {};
}

}  // namespace ak
