// column_sums: the sums of a matrix's columns, the gradient of a bias. activation_backward sums its own result.
//
// Work: reads the matrix once, two instructions an element: bound by memory. Plan: 528 blocks. A block has a strip of
// up to 256 columns and every n-th row of a share; a team of up to 32 threads, 8 columns each, has 96 bytes a thread in
// flight, 96 KB an SM, which holds four blocks. Shared memory combines a block's teams, and gemm_column_sums_kernel the
// shares: 2 % of the traffic for 32,768 x 768, within L2. Rows that are not aligned to 16 bytes are read element by
// element, in the same order of additions. Trap: the result is a gradient and must be reproducible, so teams and shares
// depend on the shape alone, neither on the GPU nor on alignment.
#include "column_sums/call.h"
#include "column_sums/strip.cuh"
#include "device/dependent_launch.cuh"

namespace ak {
namespace {

template <class T, int kVec>
AK_KERNEL(ColumnStrips::kThreads, 4)
column_sums_kernel(AK_PARAM(ColumnSums) p, AK_PARAM(ColumnStrips) strips) {
  constexpr int kRows =
      kVec == 1 ? 2 : 96 / (ColumnStrips::kColumns * sizeof(T));  // 96 bytes of a thread, or 16 elements
  using Elements = Vec<T, kVec>;
  wait_for_previous_kernel();
  allow_next_kernel();
  const T* x = static_cast<const T*>(p.x);
  sum_strip<Elements, kVec, kRows>(
      p, strips, [&](int64_t at) { return load_vec<kVec, Cache::kStreaming>(x + at); },
      [](const Elements& v, int64_t, bool) { return v; });
}

template <class T>
Status run_column_sums(const ColumnSums& p, Stream stream) {
  constexpr int kVec = kWord / sizeof(T);
  const bool aligned = vector_aligned(p.x) && p.pitch % kVec == 0 && p.columns % kVec == 0;
  const auto kernel = aligned ? column_sums_kernel<T, kVec> : column_sums_kernel<T, 1>;
  return launch_strips("column_sums", kernel, p, p, stream);
}

}  // namespace

Status column_sums(const ColumnSums& p, Stream stream) {
  if (p.type == DType::kFloat32) return run_column_sums<float>(p, stream);
  return p.type == DType::kBFloat16 ? run_column_sums<bf16>(p, stream) : run_column_sums<fp16>(p, stream);
}

}  // namespace ak
