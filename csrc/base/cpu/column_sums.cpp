#include "base/cpu/column_sums.h"

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

AK_SIMD_CLONES void move_span(float* __restrict sums, double* __restrict totals, int64_t width) {
  for (int64_t i = 0; i < width; ++i) totals[i] += static_cast<double>(sums[i]), sums[i] = 0.0f;
}

}  // namespace

void move_sums(float* sums, double* totals, int64_t width) { move_span(sums, totals, width); }

void add_rows(const void* matrix, DType dtype, int64_t rows, int64_t width, float* sums) {
  with_narrow_dtype(dtype, [=]<typename T>(T) { add_rows(static_cast<const T*>(matrix), rows, width, sums); });
}

}  // namespace ak
