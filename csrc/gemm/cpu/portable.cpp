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

// A tensor over memory that outlives it.
Tensor view(const void* data, DType type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const ScalarType dtype = type == DType::kFloat16    ? ScalarType::Half
                           : type == DType::kBFloat16 ? ScalarType::BFloat16
                                                      : ScalarType::Float;
  return torch::stable::from_blob(const_cast<void*>(data), sizes, strides,
                                  torch::stable::Device{torch::headeronly::DeviceType::CPU}, dtype);
}

// `batch` matrices, or one without a dimension for the batch.
struct Shape {
  int64_t batch, rows, columns;

  std::vector<int64_t> sizes() const {
    return batch > 1 ? std::vector{batch, rows, columns} : std::vector{rows, columns};
  }
  std::vector<int64_t> strides(int64_t batch_stride, int64_t row_stride, int64_t column_stride) const {
    return batch > 1 ? std::vector{batch_stride, row_stride, column_stride} : std::vector{row_stride, column_stride};
  }
};

// An operand in fp32. A batch that shares one matrix is widened once.
class Widened {
 public:
  Widened(const void* data, DType type, Shape shape, int64_t batch_stride, int64_t row_stride, int64_t column_stride)
      : shape_(shape) {
    if (batch_stride == 0) shape.batch = 1;
    matrices_ = torch::stable::to(
        view(data, type, shape.sizes(), shape.strides(batch_stride, row_stride, column_stride)), ScalarType::Float);
  }
  int64_t batch_stride() const { return matrices_.dim() == 3 ? matrices_.stride(0) : 0; }
  int64_t row_stride() const { return matrices_.stride(matrices_.dim() - 2); }
  int64_t column_stride() const { return matrices_.stride(matrices_.dim() - 1); }
  const float* matrix(int64_t batch) const {
    return static_cast<const float*>(matrices_.const_data_ptr()) + batch * batch_stride();
  }
  Tensor tensor() const {
    if (matrices_.dim() == 3 || shape_.batch == 1) return matrices_;
    return view(matrices_.const_data_ptr(), DType::kFloat32, shape_.sizes(),
                shape_.strides(0, row_stride(), column_stride()));
  }

 private:
  Shape shape_;
  Tensor matrices_;
};

void call_out(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
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

}  // namespace

void portable_product(const GemmProblem& q, float* sums) {
  const Widened a(q.a, q.type, {q.batch, q.m, q.k}, q.batch_stride_a, q.m_major_a ? 1 : q.ld_a,
                  q.m_major_a ? q.ld_a : 1);
  const Widened b(q.b, q.type, {q.batch, q.k, q.n}, q.batch_stride_b, q.n_major_b ? q.ld_b : 1,
                  q.n_major_b ? 1 : q.ld_b);
  const int64_t elements = int64_t{q.m} * q.n;
  if (!q.batch_invariant) {
    const Shape shape{q.batch, q.m, q.n};
    return call_out(q.batch == 1 ? "aten::mm" : "aten::bmm", a.tensor(), b.tensor(),
                    view(sums, DType::kFloat32, shape.sizes(), shape.strides(elements, q.n, 1)));
  }
  for (int64_t i = 0; i < q.batch; ++i) {
    chain_product({a.matrix(i), q.m, q.k, a.row_stride(), a.column_stride()},
                  {b.matrix(i), q.k, q.n, b.row_stride(), b.column_stride()}, sums + i * elements);
  }
}

}  // namespace ak
