// cast_(destinations, sources, seed, step): every element of a list widened or rounded to the dtype of its destination.
#include <cstring>

#include "ops/cast_arguments.h"
#include "ops/cpu/arguments.h"
#include "ops/cpu/chunks.h"
#include "ops/cpu/stochastic.h"

namespace ak {
namespace {

constexpr const char* kOp = "cast_";

void cast_tile(const Tensor& destination, const Tensor& source, int64_t at, int64_t n, const RandomKey* key) {
  alignas(64) float buffer[kTile];
  const ScalarType to = destination.scalar_type(), from = source.scalar_type();
  void* const data = destination.mutable_data_ptr();
  if (to == ScalarType::Float) {  // widened right where it belongs
    float* const wide = static_cast<float*>(data) + at;
    const float* const values = load_tile(source.const_data_ptr(), from, at, n, wide);
    if (values != wide) std::memcpy(wide, values, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const float* const values = load_tile(source.const_data_ptr(), from, at, n, buffer);
  if (key) {
    store_stochastic(values, data, to, at, n, *key);
  } else {
    store_tile(values, data, to, at, n);
  }
}

void cast_(const TensorList destinations, const TensorList sources, const std::optional<int64_t> seed,
           const std::optional<Tensor> step) {
  check_casts(kOp, destinations, sources);
  for (size_t i = 0; i < destinations.size(); ++i) {
    check_cpu(kOp, {"destinations", static_cast<int64_t>(i)}, destinations[i]);
    check_cpu(kOp, {"sources", static_cast<int64_t>(i)}, sources[i]);
  }
  const auto count = static_cast<uint32_t>(step ? read_scalar<float>(kOp, {"step"}, *step) : 0.0f);

  const std::vector<Chunk> chunks = make_chunks(static_cast<int64_t>(sources.size()),
                                                [&](int64_t i) { return sources[static_cast<size_t>(i)].numel(); });
  for_each_chunk(chunks, [&](int64_t, const Chunk& chunk) {
    const size_t i = static_cast<size_t>(chunk.tensor);
    const RandomKey key{static_cast<uint64_t>(seed.value_or(0)), count, static_cast<uint32_t>(i)};
    for (int64_t at = chunk.begin; at < chunk.end; at += kTile)
      cast_tile(destinations[i], sources[i], at, std::min(kTile, chunk.end - at), seed ? &key : nullptr);
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("cast_", TORCH_BOX(&ak::cast_)); }
