// _column_sums on the CPU: the fp32 sums of the columns of a matrix. Work: reads it once. ATen would widen a 16-bit one
// to a copy of twice its size first; on the portable path (gemm_isa.h) it still does, for the bits that it has there.
#include "base/cpu/column_sums.h"

#include "base/check.h"
#include "base/cpu/empty.h"
#include "gemm/cpu/call.h"
#include "base/cpu/isa.h"

namespace ak {
namespace {

// Four rows at a time, so that the sums are read and written a quarter as often.
template <typename T>
AK_SIMD_CLONES void add_rows(const T* matrix, int64_t rows, int64_t width, float* __restrict sums) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const T *a = matrix + r * width, *b = a + width, *c = b + width, *d = c + width;
    for (int64_t i = 0; i < width; ++i)
      sums[i] = (((sums[i] + to_float(a[i])) + to_float(b[i])) + to_float(c[i])) + to_float(d[i]);
  }
  for (; r < rows; ++r) {
    const T* row = matrix + r * width;
    for (int64_t i = 0; i < width; ++i) sums[i] += to_float(row[i]);
  }
}

AK_SIMD_CLONES void add_rows(const fp16* matrix, int64_t rows, int64_t width, float* __restrict sums) {
  float tile[kTile];
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; c += kTile) {
      const int64_t n = std::min(kTile, width - c);
      widen_half(matrix + r * width + c, tile, n);
      for (int64_t i = 0; i < n; ++i) sums[c + i] += tile[i];
    }
  }
}

Tensor column_sums(const Tensor& x) {
  constexpr const char* op = "_column_sums";
  check_dtype(op, {"x"}, x, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(x.is_cpu() && x.dim() == 2, op, ": x must be a matrix on the CPU; got ", Ints{x.sizes()});
  const Tensor dense = torch::stable::contiguous(x);
  const Tensor sums = empty_tensor({x.size(1)}, ScalarType::Float);
  if (column_sums_call(dense.const_data_ptr(), dtype_of(dense.scalar_type()), x.size(0), x.size(1),
                       static_cast<float*>(sums.mutable_data_ptr())))
    return sums;
  const int64_t dim = 0;
  return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(&dim, 1), false, ScalarType::Float);
}

}  // namespace

void add_rows(const void* matrix, DType dtype, int64_t rows, int64_t width, float* sums) {
  with_narrow_dtype(dtype, [=]<typename T>(T) { add_rows(static_cast<const T*>(matrix), rows, width, sums); });
}

AK_EXPORT bool column_sums_call(const void* matrix, DType type, int64_t rows, int64_t width, float* sums) {
  if (current_isa() == Isa::portable) return false;
  const char* data = static_cast<const char*>(matrix);
  const int64_t row_bytes = width * bytes_of(type);
  sum_columns(rows, width, sums, [=](int64_t begin, int64_t end, float* strip) {
    add_rows(data + begin * row_bytes, type, end - begin, width, strip);
  });
  return true;
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { m.impl("_column_sums", TORCH_BOX(&ak::column_sums)); }
