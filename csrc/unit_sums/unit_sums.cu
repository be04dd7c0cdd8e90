// unit_sums_: sums over rows in an order that no split of the rows at a multiple of 64 changes.
//
// Work: reads grad, and x if there is one, once: bound by memory. Plan: a thread adds one column of a unit of 64 rows,
// with 8 or 16 rows in flight, and leaves the sum in scratch, 4 bytes per 64 elements; a second kernel adds the units
// of a column in order, from what `sums` holds. Trap: the order within a unit must not depend on the number of rows.
#include "unit_sums/call.h"

#include "base/row.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kUnitThreads = 256;
constexpr int kChainThreads = 32;
constexpr int kUnitsInFlight = 16;

/// A thread's column of a unit of rows of `rows`, from `begin` on: f(sum, loaded) adds row by row what load(row) has
/// fetched, kInFlight rows at a time. Past the end the last row is fetched once more, and not added.
template <int kInFlight, class Load, class Add>
AK_DEVICE float sum_unit(int64_t begin, int rows, Load load, Add add) {
  float sum = 0.0f;
  AK_NO_UNROLL
  for (int first = 0; first < rows; first += kInFlight) {
    decltype(load(begin)) loaded[kInFlight];
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) loaded[i] = load(begin + (first + i < rows ? first + i : rows - 1));
    AK_UNROLL
    for (int i = 0; i < kInFlight; i++) {
      if (first + i < rows) sum += add(loaded[i]);
    }
  }
  return sum;
}

/// The operands of an element of the gradient of a norm's weight.
template <class T, class X>
struct NormElement {
  T grad;
  X x;
  float mean, rstd;
};

/// kNorm: of a norm's weight.
template <class T, bool kNorm>
AK_KERNEL(kUnitThreads, kNorm ? 3 : 4)
unit_sums_kernel(AK_PARAM(UnitSums) p, int tiles) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int unit = block_index() / tiles;
  const int64_t column = static_cast<int64_t>(block_index() - unit * tiles) * kUnitThreads + thread_index();
  if (column >= p.columns) return;
  const int64_t begin = unit * kUnitRows;
  const int rows = p.rows - begin < kUnitRows ? static_cast<int>(p.rows - begin) : static_cast<int>(kUnitRows);
  const T* grad = static_cast<const T*>(p.grad) + column;
  const auto load_grad = [&](int64_t row) { return load<Cache::kStreaming>(grad + row * p.columns); };
  const auto store_sum = [&](float sum) { store(p.units + static_cast<int64_t>(unit) * p.columns + column, sum); };
  if constexpr (kNorm) {
    with_row_dtype(p.x_type, [&]<class X>(X) {
      const X* x = static_cast<const X*>(p.x) + column;
      store_sum(sum_unit<8>(
          begin, rows,
          [&](int64_t row) {
            return NormElement<T, X>{load_grad(row), load(x + row * p.columns),
                                     p.mean == nullptr ? 0.0f : load(p.mean + row), load(p.rstd + row)};
          },
          [](const NormElement<T, X>& e) { return to_float(e.grad) * normalized(to_float(e.x), e.mean, e.rstd); }));
    });
  } else {
    store_sum(sum_unit<16>(begin, rows, load_grad, [](T value) { return to_float(value); }));
  }
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
