// The fp32 product of 16-bit matrices on the CPU: ATen's fp32 matmul, or a loop of our own where a row must not depend
// on its neighbours.
//
// The operands are widened to fp32 first (exactly), so the sums are fp32 whatever the machine. Why not ATen's own
// 16-bit matmul, where no epilogue asks for the fp32 sums? For fp16 it is slower (3 to 5 times on an AVX-512 machine).
// For bf16 it is 4 times faster where the CPU has bf16 instructions, but these flush subnormal inputs and results to
// zero (2^-130 * 2^16 summed over 64 gives 0), and on other machines it takes other paths: the result would depend on
// the CPU.
//
// The batch-invariant product: a BLAS chooses its order of summation by shape, alignment and number of threads. Here
// each element is one chain of fused multiply-adds along K, whichever tile it falls into, so its bits depend on its row
// and column alone (and are the same on every machine). A tile of 4 x 32 accumulators stays in registers.
//
// Traps: the product goes through the `out` overloads of ATen, which autocast leaves alone; the functional ones would
// be cast back to 16 bits when the caller is inside torch.autocast. torch.set_float32_matmul_precision("medium") also
// holds for this product: on CPUs with AMX it then rounds fp16 operands to bf16, as the user asked of every fp32
// matmul.
#include "gemm/cpu/portable.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/config.h"
#include "base/cpu/simd.h"

namespace ak {
namespace {

Tensor call_out(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A batch that repeats one matrix (stride 0) is widened once and expanded again.
Tensor widen(const Tensor& t) {
  if (t.dim() == 3 && t.size(0) > 1 && t.stride(0) == 0) {
    Tensor matrix = torch::stable::to(torch::stable::select(t, 0, 0), ScalarType::Float);
    const std::vector<int64_t> sizes{t.size(0), t.size(1), t.size(2)};
    std::array<StableIValue, 3> stack{torch::stable::detail::from(matrix), torch::stable::detail::from(sizes),
                                      torch::stable::detail::from(false)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::expand", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  return torch::stable::to(t, ScalarType::Float);
}

constexpr int64_t kRows = 4, kColumns = 32;

// out[i, j] = sum over p of a[i, p] * b[p, j] for a full tile. `b` is packed, kColumns floats a row; the rows of a are
// given by pointers, of which some may be the same.
AK_SIMD_CLONES void chain_tile(const float* const* a, int64_t a_step, const float* b, int64_t k, float* out) {
  float acc[kRows][kColumns] = {};
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

// out[m, n], contiguous, of a and b in any strides. Threads share the panels of kColumns columns.
void chain_product(const Matrix& a, const Matrix& b, float* out) {
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

Tensor portable_product(const Tensor& a, const Tensor& b, bool batch_invariant, const Tensor* room) {
  const Tensor out = room ? *room : empty_tensor(product_sizes(a, b), ScalarType::Float);
  const Tensor a32 = widen(a), b32 = widen(b);
  if (!batch_invariant) return call_out(a.dim() == 2 ? "aten::mm" : "aten::bmm", a32, b32, out);
  if (out.numel() == 0) return out;
  const int64_t batches = a.dim() == 3 ? a.size(0) : 1, elements = out.numel() / batches;
  float* to = static_cast<float*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < batches; ++i) chain_product(matrix_of(a32, i), matrix_of(b32, i), to + i * elements);
  return out;
}

}  // namespace ak
