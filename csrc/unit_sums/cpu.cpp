// unit_sums_ on the CPU. Threads share the units, whose sums are then added in order: the same bits for any number of
// threads and every instruction set.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "base/cpu/chunks.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/tile.h"
#include "unit_sums/call.h"

namespace ak {
namespace {

AK_SIMD_CLONES void add_products(const float* __restrict grad, const float* __restrict x, float mean, float rstd,
                                 float* __restrict sums, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sums[i] += grad[i] * normalized(x[i], mean, rstd);
}

void add_unit(const UnitSums& p, int64_t unit, float* sums) {
  const int64_t begin = unit * kUnitRows, end = std::min(p.rows, begin + kUnitRows);
  if (!p.x) {
    const char* rows = static_cast<const char*>(p.grad) + begin * p.columns * bytes_of(p.grad_type);
    return add_rows(rows, p.grad_type, end - begin, p.columns, sums);
  }
  float grad_tile[kTile], x_tile[kTile];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < p.columns; c += kTile) {
      const int64_t n = std::min<int64_t>(kTile, p.columns - c), at = r * p.columns + c;
      const float* grad = load_tile(p.grad, p.grad_type, at, n, grad_tile);
      const float* x = load_tile(p.x, p.x_type, at, n, x_tile);
      add_products(grad, x, p.mean ? p.mean[r] : 0.0f, p.rstd[r], sums + c, n);
    }
  }
}

}  // namespace

Status unit_sums(const UnitSums& p, Stream) {
  const int64_t columns = p.columns, units = p.unit_count();
  std::vector<float> sums(static_cast<size_t>(units * columns), 0.0f);
  const int64_t grain = std::max<int64_t>(1, kGrain / (kUnitRows * columns));
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) add_unit(p, unit, sums.data() + unit * columns);
  });
  if (p.fresh) std::fill_n(p.sums, columns, 0.0f);
  add_rows(sums.data(), DType::kFloat32, units, columns, p.sums);
  return {};
}

}  // namespace ak
