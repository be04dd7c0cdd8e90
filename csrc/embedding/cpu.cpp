// embedding_accumulate_ on the CPU: out[r] += sum of the rows of grad whose index is r, in fp32, rounded once.
//
// A run of equal indices belongs to the thread in whose share of the entries it begins, which adds it in the order of
// the entries: the bits are the same for any number of threads.
#include <algorithm>
#include <vector>

#include "base/cpu/arguments.h"
#include "base/cpu/chunks.h"
#include "base/cpu/tile.h"
#include "embedding/arguments.h"

namespace ak {
namespace {

constexpr const char* kOp = "embedding_accumulate_";

template <typename T>
AK_SIMD_CLONES void add_span(const T* __restrict row, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += to_float(row[i]);
}

template <typename T>
AK_SIMD_CLONES void add_quotient_span(const float* __restrict sum, float count, T* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<T>(to_float(out[i]) + sum[i] / count);
}

void embedding_accumulate(Tensor out, const Tensor& grad, const Tensor& sorted, const Tensor& order,
                          int64_t padding_idx, bool scale_by_frequency) {
  check_embedding(kOp, out, grad, sorted, order);
  for (const auto& [name, t] :
       {std::pair{"out", &std::as_const(out)}, {"grad", &grad}, {"sorted", &sorted}, {"order", &order}})
    check_cpu(kOp, {name}, *t);
  const int64_t entries = grad.size(0), columns = grad.size(1), rows = out.size(0);
  const int64_t* indices = static_cast<const int64_t*>(sorted.const_data_ptr());
  const int64_t* places = static_cast<const int64_t*>(order.const_data_ptr());
  for (int64_t i = 0; i < entries; ++i) {
    AK_CHECK(indices[i] >= 0 && indices[i] < rows, kOp, ": sorted[", i, "] is ", indices[i], "; accepted: 0 to ",
             rows - 1);
    AK_CHECK(i == 0 || indices[i - 1] <= indices[i], kOp, ": sorted[", i, "] is ", indices[i], " after ",
             indices[i - 1], "; accepted: ascending numbers");
    AK_CHECK(places[i] >= 0 && places[i] < entries, kOp, ": order[", i, "] is ", places[i], "; accepted: 0 to ",
             entries - 1);
  }
  const void* from = grad.const_data_ptr();
  void* const to = out.mutable_data_ptr();
  const ScalarType grad_dtype = grad.scalar_type(), out_dtype = out.scalar_type();

  const auto add_run = [&](int64_t first, int64_t behind, std::vector<float>& sum) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    with_dtype(grad_dtype, [&]<typename T>(T) {
      for (int64_t i = first; i < behind; ++i)
        add_span(static_cast<const T*>(from) + places[i] * columns, sum.data(), columns);
    });
    const float count = scale_by_frequency ? static_cast<float>(behind - first) : 1.0f;
    with_dtype(out_dtype, [&]<typename T>(T) {
      add_quotient_span(sum.data(), count, static_cast<T*>(to) + indices[first] * columns, columns);
    });
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, entries, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(columns));
    while (begin > 0 && begin < end && indices[begin] == indices[begin - 1]) ++begin;  // another thread's run
    while (begin < end) {
      int64_t behind = begin + 1;
      while (behind < entries && indices[behind] == indices[begin]) ++behind;
      if (indices[begin] != padding_idx) add_run(begin, behind, sum);
      begin = behind;
    }
  });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) {
  m.impl("embedding_accumulate_", TORCH_BOX(&ak::embedding_accumulate));
}
