// cast_(destinations, sources, seed, step): every element of a list widened or rounded to the dtype of its destination.
#include <cstring>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "cast/arguments.h"
#include "cast/cpu_call.h"
#include "update/cpu_stochastic.h"

namespace ak {
namespace {

constexpr const char* kOp = "cast_";

// Calls work(i, begin, end) for stretches of the elements of casts[i], on several threads.
template <typename Work>
void for_each_stretch(const std::vector<Cast>& casts, const Work& work) {
  const auto chunks =
      make_chunks(static_cast<int64_t>(casts.size()), [&](int64_t i) { return casts[static_cast<size_t>(i)].numel; });
  for_each_chunk(chunks, [&](int64_t, const Chunk& c) { work(static_cast<size_t>(c.tensor), c.begin, c.end); });
}

void cast_stretch(const Cast& cast, int64_t begin, int64_t end) {
  char* const to = static_cast<char*>(cast.to) + begin * bytes_of(cast.to_type);
  const int64_t n = end - begin;
  if (cast.to_type == cast.from_type) {
    std::memcpy(to, static_cast<const char*>(cast.from) + begin * bytes_of(cast.to_type),
                static_cast<size_t>(n * bytes_of(cast.to_type)));
  } else if (cast.to_type == ScalarType::Float) {
    load_tile(cast.from, cast.from_type, begin, n, static_cast<float*>(cast.to) + begin);
  } else if (cast.from_type == ScalarType::Float) {
    store_tile(static_cast<const float*>(cast.from) + begin, cast.to, cast.to_type, begin, n);
  } else {
    alignas(64) float buffer[kTile];
    for (int64_t at = begin; at < end; at += kTile) {
      const int64_t count = std::min(kTile, end - at);
      store_tile(load_tile(cast.from, cast.from_type, at, count, buffer), cast.to, cast.to_type, at, count);
    }
  }
}

void round_stretch(const Cast& cast, int64_t begin, int64_t end, const RandomKey& key) {
  if (cast.to_type == ScalarType::Float) return cast_stretch(cast, begin, end);
  alignas(64) float buffer[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = std::min(kTile, end - at);
    store_stochastic(load_tile(cast.from, cast.from_type, at, count, buffer), cast.to, cast.to_type, at, count, key);
  }
}

void cast_(const TensorList destinations, const TensorList sources, const std::optional<int64_t> seed,
           const std::optional<Tensor> step) {
  check_casts(kOp, destinations, sources);
  std::vector<Cast> casts;
  for (size_t i = 0; i < destinations.size(); ++i) {
    const Tensor &destination = destinations[i], &source = sources[i];
    check_cpu(kOp, {"destinations", static_cast<int64_t>(i)}, destination);
    check_cpu(kOp, {"sources", static_cast<int64_t>(i)}, source);
    casts.push_back({destination.mutable_data_ptr(), source.const_data_ptr(), source.numel(), destination.scalar_type(),
                     source.scalar_type()});
  }
  const auto count = static_cast<uint32_t>(step ? read_scalar<float>(kOp, {"step"}, *step) : 0.0f);
  if (!seed) return cast_call(casts);
  for_each_stretch(casts, [&](size_t i, int64_t begin, int64_t end) {
    round_stretch(casts[i], begin, end, {static_cast<uint64_t>(*seed), count, static_cast<uint32_t>(i)});
  });
}

}  // namespace

void cast_call(const std::vector<Cast>& casts) {
  for_each_stretch(casts, [&](size_t i, int64_t begin, int64_t end) { cast_stretch(casts[i], begin, end); });
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("cast_", TORCH_BOX(&ak::cast_)); }
