// What a GEMM computes: operands, batch, epilogue and output. The kernels (gemm_sm90, gemm_sm80), their planner and the
// ops share these words.
//
//   z = alpha (A B) + bias,   C = activation(z) + beta residual         all in fp32, rounded once
//   dz = activation'(preact) applied to A B                             where `preact` is given
#pragma once
#include <cstddef>
#include <cstdint>

#include "activation/formula.h"
#include "base/half.h"
#include "device/status.h"
#include "device/tensor_list.cuh"

namespace ak {

enum class GemmOutput {
  kInputType,   ///< rounded once to the inputs' 16-bit type
  kFloat32,     ///< the fp32 sums
  kAccumulate,  ///< added to the fp32 values in C
  kPartials,    ///< of a split product: one fp32 sum per split, [splits][m][n]
};

/// Values that an epilogue reads or writes: element (batch, row, column) lies `batch * batch_stride + row * row_stride
/// + column * column_stride` elements behind `data`. Strides may be anything, 0 included. Without `data`: absent.
struct GemmValues {
  void* data = nullptr;
  DType type = DType::kFloat32;  ///< fp16, bf16 or fp32
  int64_t row_stride = 0, column_stride = 1, batch_stride = 0;
};

struct GemmEpilogue {
  float alpha = 1.0f;
  float beta = 1.0f;  ///< only used with a residual
  Activation activation = Activation::none;
  GemmValues bias;      ///< per column: row_stride 0; per row: column_stride 0; batch_stride 0
  GemmValues residual;  ///< added to the result
  GemmValues z;         ///< written: the pre-activation, as wide as B
  GemmValues preact;    ///< read; its presence turns the epilogue into the backward of `activation`
  /// Written: sums of the unrounded results over 16 rows each, [batch][ceil(m / 16)][columns of C], for
  /// gemm_column_sums. Null: absent.
  float* column_sums = nullptr;
};

/// A is m x k and B is k x n, `batch` of each. C is m x n; with swiglu, B's columns are gate, then up, and C has n / 2
/// of them; in the backward of swiglu C has 2 n: the gradients of gate, then of up. Distances are in elements.
struct GemmProblem {
  const void* a;
  const void* b;
  GemmValues c;  ///< written; read too if the output is kAccumulate
  int m, n, k;   ///< all at least 1
  int64_t ld_a,
      ld_b;        ///< between rows of A (columns, where m_major_a), and between columns of B (rows, where n_major_b)
  bool m_major_a;  ///< A lies with m contiguous, as the transpose of a row-major matrix
  bool n_major_b;  ///< B lies with n contiguous: row-major. Otherwise k is contiguous, as in x W^T
  int batch = 1;
  int64_t batch_stride_a = 0, batch_stride_b = 0;
  GemmEpilogue epilogue;
};

/// For split products. `counters` must be 0 before the launch and are 0 again after it; `partials` may hold anything.
/// Products that may run at the same time need scratch of their own.
struct GemmScratch {
  float* partials = nullptr;  ///< aligned to 16 bytes
  uint32_t* counters = nullptr;
  bool memset = false;  ///< one stands right in front of the launch, which then does not overlap what is there
};
struct GemmScratchSize {
  size_t partials = 0, counters = 0;  ///< elements
};

/// Whether the epilogue does nothing: C = A B.
inline bool is_plain(const GemmEpilogue& e) {
  return e.alpha == 1.0f && e.activation == Activation::none && !e.bias.data && !e.residual.data && !e.z.data &&
         !e.preact.data && !e.column_sums;
}

/// Whether two columns of B make one of C: the forward of swiglu.
inline bool is_halved(const GemmProblem& q) {
  return q.epilogue.activation == Activation::swiglu && !q.epilogue.preact.data;
}

/// Columns of C that the sums of A B become: in the backward of swiglu those of the values come beside.
inline int columns_of_sums(const GemmProblem& q) { return is_halved(q) ? q.n / 2 : q.n; }

/// Columns of C.
inline int columns_of_c(const GemmProblem& q) {
  if (q.epilogue.activation != Activation::swiglu) return q.n;
  return q.epilogue.preact.data ? 2 * q.n : q.n / 2;
}

}  // namespace ak
