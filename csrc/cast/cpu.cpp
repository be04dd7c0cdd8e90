// cast_ on the CPU, a tile at a time.
#include <algorithm>
#include <cstring>

#include "base/cpu/chunks.h"
#include "base/cpu/stochastic.h"
#include "base/cpu/tile.h"
#include "cast/call.h"

namespace ak {
namespace {

void cast_span(const CastRef& cast, int64_t begin, int64_t end) {
  char* const to = static_cast<char*>(cast.destination) + begin * bytes_of(cast.to);
  const int64_t n = end - begin;
  if (cast.to == cast.from) {
    std::memcpy(to, static_cast<const char*>(cast.source) + begin * bytes_of(cast.to),
                static_cast<size_t>(n * bytes_of(cast.to)));
  } else if (cast.to == DType::kFloat32) {
    load_tile(cast.source, cast.from, begin, n, static_cast<float*>(cast.destination) + begin);
  } else if (cast.from == DType::kFloat32) {
    store_tile(static_cast<const float*>(cast.source) + begin, cast.destination, cast.to, begin, n);
  } else {
    alignas(64) float buffer[kTile];
    for (int64_t at = begin; at < end; at += kTile) {
      const int64_t count = std::min(kTile, end - at);
      store_tile(load_tile(cast.source, cast.from, at, count, buffer), cast.destination, cast.to, at, count);
    }
  }
}

void cast_stochastic(const CastRef& cast, int64_t begin, int64_t end, const RandomKey& key) {
  if (cast.to == DType::kFloat32) return cast_span(cast, begin, end);
  alignas(64) float buffer[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = std::min(kTile, end - at);
    TileNumbers numbers(key, at, count);
    const float* tile = load_tile(cast.source, cast.from, at, count, buffer);
    store_stochastic(tile, cast.destination, cast.to, at, count, numbers);
  }
}

}  // namespace

AK_EXPORT Status cast(std::span<const CastRef> casts, std::optional<uint64_t> seed, const float* step, Stream) {
  const auto count = static_cast<uint32_t>(step ? *step : 0.0f);
  for_each_chunk(make_chunks(casts), [&](int64_t, const Chunk& c) {
    const CastRef& cast = casts[static_cast<size_t>(c.tensor)];
    if (seed)
      return cast_stochastic(cast, c.begin, c.end, {*seed, count, {0, static_cast<uint32_t>(c.tensor), 0, 0, 0}});
    cast_span(cast, c.begin, c.end);
  });
  return {};
}

}  // namespace ak
