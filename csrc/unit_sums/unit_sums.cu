// unit_sums_: sums over rows in an order that no split of the rows at a multiple of 64 changes.
//
// Work: reads grad, and x if there is one, once: bound by memory. Plan: a thread adds one column of a unit of 64 rows,
// with 8 or 16 rows in flight, and leaves the sum in scratch, 4 bytes per 64 elements; a second kernel adds the units
// of a column in order, from what `sums` holds. Trap: the order within a unit must not depend on the number of rows.
#include "unit_sums/call.h"

#include "base/element.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kUnitThreads = 256;
constexpr int kChainThreads = 32;
constexpr int kUnitsInFlight = 16;

/// kNorm: of a norm's weight.
template <class T, bool kNorm>
AK_KERNEL(kUnitThreads, 4)
unit_sums_kernel(AK_PARAM(UnitSums) p, int tiles) {
  constexpr int kInFlight = kNorm ? 8 : 16;  // rows
  wait_for_previous_kernel();
  allow_next_kernel();
  const int unit = block_index() / tiles;
  const int64_t column = static_cast<int64_t>(block_index() - unit * tiles) * kUnitThreads + thread_index();
  if (column >= p.columns) return;
  const int64_t begin = unit * kUnitRows;
  const int rows = p.rows - begin < kUnitRows ? static_cast<int>(p.rows - begin) : static_cast<int>(kUnitRows);
  const T* grad = static_cast<const T*>(p.grad) + begin * p.columns + column;
  float sum = 0.0f;
  AK_NO_UNROLL
  for (int first = 0; first < rows; first += kInFlight) {
    float value[kInFlight], x[kInFlight], mean[kInFlight], rstd[kInFlight];
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {  // out of bounds, the last row is repeated and not added
      const int64_t row = first + i < rows ? first + i : rows - 1;
      value[i] = to_float(load<Cache::kStreaming>(grad + row * p.columns));
      if (!kNorm) continue;
      x[i] = load_element(p.x_type, element(p.x, p.x_type, (begin + row) * p.columns + column));
      mean[i] = p.mean == nullptr ? 0.0f : load(p.mean + begin + row);
      rstd[i] = load(p.rstd + begin + row);
    }
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      if (first + i < rows) sum += kNorm ? value[i] * normalized(x[i], mean[i], rstd[i]) : value[i];
    }
  }
  store(p.units + static_cast<int64_t>(unit) * p.columns + column, sum);
}

AK_KERNEL(kChainThreads, 8) unit_chain_kernel(AK_PARAM(UnitSums) p, int units) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t column = static_cast<int64_t>(block_index()) * kChainThreads + thread_index();
  if (column >= p.columns) return;
  float sum = p.fresh ? 0.0f : load(p.sums + column);
  AK_NO_UNROLL
  for (int first = 0; first < units; first += kUnitsInFlight) {
    float value[kUnitsInFlight];
    AK_UNROLL
    for (int i = 0; i < kUnitsInFlight; i++) {
      const int unit = first + i < units ? first + i : units - 1;
      value[i] = load(p.units + static_cast<int64_t>(unit) * p.columns + column);
    }
    AK_UNROLL
    for (int i = 0; i < kUnitsInFlight; i++) {
      if (first + i < units) sum += value[i];
    }
  }
  store(p.sums + column, sum);
}

template <class T>
Status run_unit_sums(const UnitSums& p, Stream stream) {
  const int tiles = (p.columns + kUnitThreads - 1) / kUnitThreads;
  const int64_t units = p.unit_count();
  if (units * tiles > INT32_MAX) return {1, "unit_sums: more than 2^31 - 1 blocks"};
  LaunchConfig config{.name = "unit_sums",
                      .grid = static_cast<int>(units * tiles),
                      .block = kUnitThreads,
                      .overlap_previous = true,
                      .stream = stream};
  if (units > 0) {
    const Status status = p.x != nullptr ? launch(unit_sums_kernel<T, true>, config, p, tiles)
                                         : launch(unit_sums_kernel<T, false>, config, p, tiles);
    if (!status.ok()) return status;
  }
  config.name = "unit_chain";
  config.grid = (p.columns + kChainThreads - 1) / kChainThreads;
  config.block = kChainThreads;
  return launch(unit_chain_kernel, config, p, static_cast<int>(units));
}

}  // namespace

Status unit_sums(const UnitSums& p, Stream stream) {
  if (p.grad_type == DType::kFloat32) return run_unit_sums<float>(p, stream);
  return p.grad_type == DType::kBFloat16 ? run_unit_sums<bf16>(p, stream) : run_unit_sums<fp16>(p, stream);
}

}  // namespace ak
