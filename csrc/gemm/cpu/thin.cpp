// Products of few rows or few columns, as a model makes them that generates a token at a time: dot products over the
// memory of the large operand, whose K is contiguous.
//
// Work: the bytes of the large operand, each read once; the small one is packed and stays in the L1 or L2 cache. A
// few of its lanes go through the L1 cache and meet all vectors of the small one.
//
// An element is summed in the lanes of one register, then over these, whatever the number of threads.
#include <algorithm>

#include "gemm/cpu/blocked.h"
#include "gemm/cpu/scratch.h"

namespace ak {
namespace {

// Lanes of the large operand that are finished together: a unit of rows where these are its rows.
constexpr int64_t kLanesTogether = kRowUnit;
// What a thread should have to read before a second one is woken: some 10 us.
constexpr int64_t kElementsPerThread = 128 << 10;

bool few_rows(const BlockedProblem& p) { return p.m <= kThin && p.b.matrix.k_stride == 1; }
bool few_columns(const BlockedProblem& p) { return p.n <= kThin && p.a.matrix.k_stride == 1 && p.halves == 1; }

}  // namespace

bool is_thin(const BlockedProblem& problem) { return few_rows(problem) || few_columns(problem); }

void thin_product(const Kernel& kernel, const BlockedProblem& p, const Finish& finish) {
  const bool by_rows = few_rows(p);
  const BatchedOperand& few = by_rows ? p.a : p.b;
  const BatchedOperand& many = by_rows ? p.b : p.a;
  const int64_t few_lanes = by_rows ? p.m : p.n, many_lanes = by_rows ? p.n / p.halves : p.m;
  const int64_t steps = round_up(divide_up(p.k, kernel.word_elements), 1 << kernel.lanes_log2);
  const int64_t blocks = divide_up(many_lanes, kLanesTogether), width = p.halves * kLanesTogether;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (width * std::max<int64_t>(1, p.k)));
  torch::stable::parallel_for(0, p.batches * blocks, grain, [&](int64_t begin, int64_t end) {
    thread_local Scratch packed_scratch;
    uint32_t* packed = packed_scratch.of<uint32_t>(kThin * steps);
    float sums[kThin * 2 * kLanesTogether];
    int64_t packed_batch = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t batch = task / blocks, first = task % blocks * kLanesTogether;
      const int64_t lanes = std::min(kLanesTogether, many_lanes - first);
      if (batch != packed_batch) kernel.pack_rows(few.of(batch), few_lanes, p.k, steps, packed);
      packed_batch = batch;
      for (int64_t half = 0; half < p.halves; ++half)
        kernel.dot(p.k, packed, steps, few_lanes, many.of(batch).at(half * many_lanes + first, 0), lanes,
                   sums + half * kLanesTogether, by_rows ? width : 1, by_rows ? 1 : p.n);
      finish({.sums = sums,
              .stride = by_rows ? width : p.n,
              .half = p.halves == 2 ? kLanesTogether : 0,
              .row = batch * p.m + (by_rows ? 0 : first),
              .rows = by_rows ? p.m : lanes,
              .column = by_rows ? first : 0,
              .columns = by_rows ? lanes : p.n,
              .unit = by_rows ? batch : task});
    }
  });
}

}  // namespace ak
