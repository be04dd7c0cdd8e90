// column_sums on the CPU. Work: reads the matrix once. ATen would first widen a 16-bit one to a copy of twice its size.
#include "base/cpu/column_sums.h"
#include "column_sums/call.h"

namespace ak {

AK_EXPORT Status column_sums(const ColumnSums& p, Stream) {
  const char* data = static_cast<const char*>(p.x);
  const int64_t row_bytes = p.columns * static_cast<int64_t>(bytes_of(p.type));
  sum_columns(p.rows, p.columns, p.sums, [=, &p](int64_t begin, int64_t end, float* strip) {
    add_rows(data + begin * row_bytes, p.type, end - begin, p.columns, strip);
  });
  return {};
}

}  // namespace ak
