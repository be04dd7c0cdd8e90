// embedding_accumulate_ on the CPU: out[r] += sum of the rows of grad whose index is r, in fp32, rounded once.
//
// A run of equal indices belongs to the thread in whose share of the entries it begins, which adds it in the order of
// the entries: the bits are the same for any number of threads. A long run is summed in chains (sum_rows).
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "base/cpu/chunks.h"
#include "base/cpu/column_sums.h"
#include "base/cpu/tile.h"
#include "embedding/call.h"

namespace ak {
namespace {

template <typename T>
AK_SIMD_CLONES void add_span(const T* __restrict row, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += to_float(row[i]);
}

template <typename T>
AK_SIMD_CLONES void add_quotient_span(const float* __restrict sum, float count, T* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<T>(to_float(out[i]) + sum[i] / count);
}

}  // namespace

Status embedding_accumulate(const EmbeddingAccumulate& call, Stream) {
  const int64_t columns = call.columns;
  const auto add_run = [&](int64_t first, int64_t run_end, std::vector<float>& sum) {
    const auto add_entries = [&](int64_t from, int64_t to, float* total) {
      with_narrow_dtype(call.grad_type, [&]<typename T>(T) {
        for (int64_t i = from; i < to; ++i)
          add_span(static_cast<const T*>(call.grad) + call.order[i] * columns, total, columns);
      });
    };
    if (call.in_order) return add_entries(first, run_end, static_cast<float*>(call.out) + call.sorted[first] * columns);
    sum_rows(first, run_end, columns, sum.data(), add_entries);
    const float count = call.by_frequency ? static_cast<float>(run_end - first) : 1.0f;
    with_narrow_dtype(call.out_type, [&]<typename T>(T) {
      add_quotient_span(sum.data(), count, static_cast<T*>(call.out) + call.sorted[first] * columns, columns);
    });
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, call.entries, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(columns));
    const int64_t* const rows = call.sorted;
    while (begin > 0 && begin < end && rows[begin] == rows[begin - 1]) ++begin;  // another thread's run
    while (begin < end) {
      int64_t run_end = begin + 1;
      while (run_end < call.entries && rows[run_end] == rows[begin]) ++run_end;
      if (rows[begin] != call.padding_idx) add_run(begin, run_end, sum);
      begin = run_end;
    }
  });
  return {};
}

}  // namespace ak
