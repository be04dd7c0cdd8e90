// exponent_histogram(tensors) -> (counts, largest): how many elements of each tensor lie in each power of two, and the
// largest finite magnitude. Every element is read once.
//
// The bins of a tile are computed in a loop of their own, which vectorises, and counted in another. Neighbours mostly
// share a bin, and an increment that waits for the one before it takes five cycles or so: four sets of counters take
// turns.
#include <algorithm>
#include <array>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "base/half.h"
#include "gradients/exponent.h"
#include "gradients/grad_norm.h"

namespace ak {
namespace {

constexpr const char* kOp = "exponent_histogram";
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

Histogram chunk_histogram(const Tensor& tensor, const Chunk& chunk) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return chunk_histogram<fp16>(tensor.const_data_ptr(), chunk);
    case ScalarType::BFloat16:
      return chunk_histogram<bf16>(tensor.const_data_ptr(), chunk);
    case ScalarType::Float:
      return chunk_histogram<float>(tensor.const_data_ptr(), chunk);
    default:
      return chunk_histogram<double>(tensor.const_data_ptr(), chunk);
  }
}

std::tuple<Tensor, Tensor> exponent_histogram(const TensorList& tensors) {
  AK_CHECK(!tensors.empty(), kOp, ": tensors must not be empty");
  check_list(kOp, "tensors", tensors);
  const int64_t n = static_cast<int64_t>(tensors.size());
  const std::vector<Chunk> chunks = make_chunks(n, [&](int64_t i) { return tensors[static_cast<size_t>(i)].numel(); });
  std::vector<Histogram> partials(chunks.size());
  for_each_chunk(chunks, [&](int64_t index, const Chunk& chunk) {
    partials[static_cast<size_t>(index)] = chunk_histogram(tensors[static_cast<size_t>(chunk.tensor)], chunk);
  });

  std::vector<uint32_t> most(tensors.size(), 0);
  const Tensor counts = torch::stable::empty({n, kExponentBins}, ScalarType::Long);
  const Tensor largest = torch::stable::empty({n}, ScalarType::Float);
  int64_t* counts_at = static_cast<int64_t*>(counts.mutable_data_ptr());
  std::fill_n(counts_at, n * kExponentBins, 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t tensor = chunks[i].tensor;
    for (int64_t bin = 0; bin < kExponentBins; ++bin) {
      counts_at[tensor * kExponentBins + bin] += partials[i].counts[static_cast<size_t>(bin)];
    }
    most[static_cast<size_t>(tensor)] = std::max(most[static_cast<size_t>(tensor)], partials[i].largest);
  }
  std::transform(most.begin(), most.end(), static_cast<float*>(largest.mutable_data_ptr()),
                 [](uint32_t bits) { return float_of(bits); });
  return {counts, largest};
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("exponent_histogram", TORCH_BOX(&ak::exponent_histogram)); }
