// The fp32 product of 16-bit matrices on the CPU: ATen's fp32 matmul, or for batch invariance a loop.
//
// The operands are first widened to fp32, exactly, so the sums are fp32 on every machine. ATen's 16-bit matmul is
// slower for fp16 (3 to 5 times on an AVX-512 machine). For bf16 it is 4 times faster on a CPU with bf16 instructions,
// but these flush subnormal inputs and results to zero (2^-130 * 2^16 summed over 64 gives 0), so the result would
// depend on the CPU.
//
// The batch-invariant product: a BLAS chooses its order of summation by shape, alignment and number of threads. Here
// each element is one chain of fused multiply-adds along K in any tile, so its bits depend on its row and column alone
// and are the same on every machine. A tile of 4 x 32 accumulators stays in registers.
//
// Traps: the product uses ATen's `out` overloads, which autocast leaves alone; inside torch.autocast the functional
// ones would be cast back to 16 bits. torch.set_float32_matmul_precision("medium") applies here, too: on CPUs with AMX
// fp16 operands are then rounded to bf16.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/config.h"
#include "base/cpu/simd.h"
#include "gemm/cpu/product.h"

namespace ak {
namespace {

using Extents = std::array<int64_t, 3>;  // batch, rows, columns; a batch of one has no dimension

Tensor call(const char* op, const char* overload, std::array<StableIValue, 3> stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A tensor over memory that outlives it.
Tensor view(const void* data, ScalarType dtype, const Extents& sizes, const Extents& strides) {
  const size_t first = sizes[0] == 1;
  return torch::stable::from_blob(const_cast<void*>(data), {sizes.data() + first, 3 - first},
                                  {strides.data() + first, 3 - first},
                                  torch::stable::Device{torch::headeronly::DeviceType::CPU}, dtype);
}

// An operand in fp32. A matrix that a batch shares is widened once.
Tensor widen(const void* data, DType type, const Extents& sizes, const Extents& strides) {
  const ScalarType dtype = type == DType::kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
  const bool shared = sizes[0] > 1 && strides[0] == 0;
  const Extents distinct{shared ? 1 : sizes[0], sizes[1], sizes[2]};
  const Tensor wide = torch::stable::to(view(data, dtype, distinct, strides), ScalarType::Float);
  if (!shared) return wide;
  using torch::stable::detail::from;
  return call("aten::expand", "", {from(wide), from(std::vector<int64_t>(sizes.begin(), sizes.end())), from(false)});
}

constexpr int64_t kRows = 4, kColumns = 32;

// out[i, j] += sum over p of a[i, p] * b[p, j] for a full tile. `b` is packed, kColumns floats a row; pointers to the
// rows of a may repeat.
AK_SIMD_CLONES void chain_tile(const float* const* a, int64_t a_step, const float* b, int64_t k, float* out) {
  float acc[kRows][kColumns];
  std::memcpy(acc, out, sizeof(acc));
  for (int64_t p = 0; p < k; ++p) {
    for (int64_t i = 0; i < kRows; ++i) {
      const float x = a[i][p * a_step];
      for (int64_t j = 0; j < kColumns; ++j) acc[i][j] = fma(x, b[p * kColumns + j], acc[i][j]);
    }
  }
  std::memcpy(out, acc, sizeof(acc));
}

struct Matrix {
  const float* data;
  int64_t rows, columns, row_stride, column_stride;
};

// out[m, n], contiguous, of a and b in any strides; the chains start from `start`, if it is not null. Threads share the
// panels of kColumns columns.
void chain_product(const Matrix& a, const Matrix& b, const GemmValues* start, int64_t batch, float* out) {
  const int64_t m = a.rows, n = b.columns, k = a.columns;
  torch::stable::parallel_for(0, (n + kColumns - 1) / kColumns, 1, [=](int64_t begin, int64_t end) {
    std::vector<float> packed(static_cast<size_t>(k * kColumns));
    float tile[kRows * kColumns];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kColumns, width = std::min(kColumns, n - column);
      for (int64_t p = 0; p < k; ++p) {
        for (int64_t j = 0; j < width; ++j)
          packed[p * kColumns + j] = b.data[p * b.row_stride + (column + j) * b.column_stride];
      }
      for (int64_t row = 0; row < m; row += kRows) {
        const float* rows[kRows];
        for (int64_t i = 0; i < kRows; ++i) rows[i] = a.data + std::min(row + i, m - 1) * a.row_stride;
        std::fill_n(tile, kRows * kColumns, 0.0f);
        for (int64_t i = 0; start && i < std::min(kRows, m - row); ++i) {
          const float* from = static_cast<const float*>(start->data) + batch * start->batch_stride +
                              (row + i) * start->row_stride + column * start->column_stride;
          for (int64_t j = 0; j < width; ++j) tile[i * kColumns + j] = from[j * start->column_stride];
        }
        chain_tile(rows, a.column_stride, packed.data(), k, tile);
        for (int64_t i = 0; i < std::min(kRows, m - row); ++i)
          std::copy_n(tile + i * kColumns, width, out + (row + i) * n + column);
      }
    }
  });
}

Matrix matrix_of(const Tensor& t, int64_t batch) {
  const int64_t d = t.dim();
  const float* data = static_cast<const float*>(t.const_data_ptr()) + (d == 3 ? batch * t.stride(0) : 0);
  return {data, t.size(d - 2), t.size(d - 1), t.stride(d - 2), t.stride(d - 1)};
}

}  // namespace

void portable_product(const GemmProblem& q, float* sums) {
  const int64_t elements = int64_t{q.m} * q.n;
  const auto strides = [](int64_t batch_stride, int64_t ld, bool by_columns) {
    return by_columns ? Extents{batch_stride, 1, ld} : Extents{batch_stride, ld, 1};
  };
  const Tensor a = widen(q.a, q.type, {q.batch, q.m, q.k}, strides(q.batch_stride_a, q.ld_a, q.m_major_a));
  const Tensor b = widen(q.b, q.type, {q.batch, q.k, q.n}, strides(q.batch_stride_b, q.ld_b, !q.n_major_b));
  if (!q.batch_invariant) {
    using torch::stable::detail::from;
    const Tensor out = view(sums, ScalarType::Float, {q.batch, q.m, q.n}, {elements, q.n, 1});
    call(q.batch == 1 ? "aten::mm" : "aten::bmm", "out", {from(a), from(b), from(out)});
    return;
  }
  const GemmValues* const start = is_chained(q) ? &q.c : nullptr;
  for (int64_t i = 0; i < q.batch; ++i) chain_product(matrix_of(a, i), matrix_of(b, i), start, i, sums + i * elements);
}

}  // namespace ak
