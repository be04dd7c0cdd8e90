// dropout on the CPU: out = dropout(x) + residual. Work: reads x (and residual), writes out; most of it is the
// generator's. A tile at a time, whose random words stay in the L1 cache.
#include <algorithm>

#include "base/cpu/chunks.h"
#include "base/cpu/empty.h"
#include "base/cpu/tile.h"
#include "dropout/arguments.h"
#include "dropout/cpu_span.h"

namespace ak {
namespace {

Tensor dropout(const Tensor& x_in, const Tensor& seed, const std::optional<Tensor> residual_in, const double p,
               const ScalarType out_dtype) {
  check_dropout(x_in, seed, residual_in, p, out_dtype);
  AK_CHECK(x_in.is_cpu() && seed.is_cpu() && (!residual_in || residual_in->is_cpu()),
           "dropout: all tensors must be on the CPU");
  const Tensor x = torch::stable::contiguous(x_in);
  const Tensor residual = residual_in ? torch::stable::contiguous(*residual_in) : x;
  const Tensor out = empty_tensor({x.sizes().begin(), x.sizes().end()}, out_dtype);
  const void* from = x.const_data_ptr();
  const void* added = residual_in ? residual.const_data_ptr() : nullptr;
  void* to = out.mutable_data_ptr();
  const ScalarType x_dtype = x.scalar_type(), added_dtype = residual.scalar_type();
  const int64_t numel = x.numel();
  const uint64_t key = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.const_data_ptr()));
  const DropoutRate rate = dropout_rate(p);
  torch::stable::parallel_for(0, (numel + kTile - 1) / kTile, kGrain / kTile, [=](int64_t begin, int64_t end) {
    alignas(64) float x_tile[kTile], added_tile[kTile];
    for (int64_t at = begin * kTile; at < std::min(numel, end * kTile); at += kTile) {
      const int64_t n = std::min(kTile, numel - at);
      const float* values = load_tile(from, x_dtype, at, n, x_tile);
      float* result = out_dtype == ScalarType::Float ? static_cast<float*>(to) + at : x_tile;
      drop_span(values, at, n, key, rate, added ? load_tile(added, added_dtype, at, n, added_tile) : nullptr, result);
      if (out_dtype != ScalarType::Float) store_tile(result, to, out_dtype, at, n);
    }
  });
  return out;
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("dropout", TORCH_BOX(&ak::dropout)); }
