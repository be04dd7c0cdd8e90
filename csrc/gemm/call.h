// The call of a GEMM: operands, batch, epilogue and result, as the CPU kernel, gemm_sm90, gemm_sm80, the planner, the
// glue and autograd's nodes share it.
//
//   z = alpha (A B) + bias,   C = activation(z) + beta residual         all in fp32, rounded once
//   dz = activation'(preact) applied to A B                             if `preact` is given
//   C = alpha (A B) + beta residual + diagonal I                        if `symmetric`: its lower triangle, mirrored
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "activation/formula.h"
#include "base/half.h"
#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

/// Tensor that an epilogue reads or writes: element (batch, row, column) is at offset `batch * batch_stride + row *
/// row_stride + column * column_stride` from `data`, in elements. Any strides, including 0. Absent if `data` is null.
struct GemmValues {
  void* data = nullptr;
  DType type = DType::kFloat32;  ///< fp16, bf16 or fp32
  int64_t row_stride = 0, column_stride = 1, batch_stride = 0;
};

struct GemmEpilogue {
  float alpha = 1.0f;
  float beta = 1.0f;      ///< only used with a residual
  float diagonal = 0.0f;  ///< added to the diagonal of a symmetric C
  Activation activation = Activation::none;
  GemmValues bias;      ///< per column: row_stride 0; per row: column_stride 0; batch_stride 0
  GemmValues residual;  ///< added to the result
  GemmValues z;         ///< output: the pre-activation, as wide as B
  GemmValues preact;    ///< input; if present, the epilogue is the backward of `activation`
  /// Output: column sums of the unrounded results over groups of rows, column_sums_size() floats for gemm_column_sums.
  /// Absent if null.
  float* column_sums = nullptr;
};

/// Upper bound of m, n, k and batch: kernels round up to whole tiles.
inline constexpr int64_t kMostGemmSize = INT32_MAX - 1023;

/// A matrix that continues A along the dimension in which A is contiguous: from column `begin` on, or if m_major_a from
/// row `begin` on. Absent if `begin` is past A's end.
struct GemmSegment {
  const void* data = nullptr;
  int begin = INT32_MAX;  ///< a multiple of 64
  int64_t ld = 0;
};

/// A is m x k and B is k x n, `batch` of each. C is m x n. Swiglu: B's columns are gate, then up, and C has n / 2
/// columns. Backward of swiglu: C has 2 n columns, the gradients of gate, then of up. Strides are in elements.
struct GemmProblem {
  const void* a;
  const void* b;
  DType type = DType::kBFloat16;  ///< of A and B: fp16 or bf16
  GemmValues c;
  /// Adds to an fp32 C, without a residual. With batch_invariant and alpha 1 the sum over k starts from C, so that the
  /// parts of a k that is cut at multiples of 64 give the bits of the whole.
  bool accumulate = false;
  /// C, of the type of A and B, is its lower triangle and the mirror image of that, whatever A B is. Takes alpha, beta,
  /// a residual of C's type and `diagonal`; m = n.
  bool symmetric = false;
  bool batch_invariant = false;  ///< the bits of a row of C depend on that row of A and on B alone
  int m, n, k;                   ///< at least 1; on the CPU also 0
  int64_t ld_a;                  ///< between rows of A, or columns if m_major_a
  int64_t ld_b;                  ///< between columns of B, or rows if n_major_b
  bool m_major_a;                ///< A is contiguous in m: the transpose of a row-major matrix
  bool n_major_b;                ///< B is contiguous in n: row-major. Otherwise in k, as in x W^T
  int batch = 1;
  int64_t batch_stride_a = 0, batch_stride_b = 0;
  GemmEpilogue epilogue;
  GemmSegment more_a[2];  ///< in the order of `begin`; gemm_sm90 alone reads them
};

/// A product for each group of rows of A and C, or of terms. A group's range ends before `offs[group]`, an end in
/// device memory that is clamped to [previous end, m or k], and begins at the end of the one before; ranges may be
/// empty.
///
/// Rows: `product` has all rows, group g takes B + g batch_stride_b and a bias at g bias.batch_stride, and rows of C
/// (and of z) past the last end are zero. Sums: `product` has all terms, and C + g c.batch_stride takes the product
/// over those of group g, which is 0 without terms; with `accumulate` such a C is not touched. Its `batch` is 1.
struct GroupedProblem {
  GemmProblem product;
  bool sums;
  int groups;
  const int32_t* offs;
  int64_t offs_stride;
};

/// The grouped product on the CPU, under the same conditions.
Status grouped_gemm_cpu(const GroupedProblem& problem, Stream stream);

/// Scratch of split products. `counters` must be 0 before the launch and are 0 again after it; `partials` need not be
/// initialized. Concurrent products need separate scratch.
struct GemmScratch {
  float* partials = nullptr;  ///< aligned to 16 bytes
  uint32_t* counters = nullptr;
};
struct GemmScratchSize {
  size_t partials = 0, counters = 0;  ///< elements
};

/// The product on the CPU. There C and z are contiguous, unless C is its own residual or added to; preact and any other
/// residual are contiguous.
Status gemm_cpu(const GemmProblem& problem, Stream stream);

/// True if there is no epilogue: C = A B.
inline bool is_plain(const GemmEpilogue& e) {
  return e.alpha == 1.0f && e.diagonal == 0.0f && e.activation == Activation::none && !e.bias.data &&
         !e.residual.data && !e.z.data && !e.preact.data && !e.column_sums;
}

/// True if A is more than one matrix.
inline bool is_segmented(const GemmProblem& q) { return q.more_a[0].data != nullptr; }

/// True if the sum over k starts from C.
inline bool is_chained(const GemmProblem& q) { return q.accumulate && q.batch_invariant && q.epilogue.alpha == 1.0f; }

/// True if two columns of B make one of C: forward of swiglu.
inline bool is_halved(const GemmProblem& q) {
  return q.epilogue.activation == Activation::swiglu && !q.epilogue.preact.data;
}

/// Columns of C that correspond to accumulators: backward of swiglu writes as many again, for the values.
inline int columns_of_sums(const GemmProblem& q) { return is_halved(q) ? q.n / 2 : q.n; }

/// Columns of C.
inline int columns_of_c(const GemmProblem& q) {
  if (q.epilogue.activation != Activation::swiglu) return q.n;
  return q.epilogue.preact.data ? 2 * q.n : q.n / 2;
}

}  // namespace ak
