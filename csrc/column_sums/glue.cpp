// column_sums: from the schema to column_sums/call.h. Matrices whose rows have gaps are made contiguous first.
#include "column_sums/glue.h"

namespace ak {
namespace {

Tensor run_column_sums(const Tensor& x_in) {
  constexpr const char* op = "column_sums";
  OpCall call(op, {"x"}, x_in);
  check_dtype(op, {"x"}, x_in, kNarrowDtypes);
  AK_CHECK(x_in.dim() == 2 && x_in.size(1) <= INT32_MAX, op, ": x must be a matrix of at most ", INT32_MAX,
           " columns; got shape ", Ints{x_in.sizes()});
#ifdef AK_ON_CPU
  if (aten_sums_columns()) return aten_column_sums(x_in);
#endif
  const Tensor x = !call.kOnCpu && x_in.stride(1) == 1 ? x_in : torch::stable::contiguous(x_in);
  const Tensor sums = call.empty({"sums"}, {x.size(1)}, ScalarType::Float);
  ColumnSums p{.x = call.read({"x"}, x),
               .sums = static_cast<float*>(sums.mutable_data_ptr()),
               .slots = nullptr,
               .type = dtype_of(x.scalar_type()),
               .rows = x.size(0),
               .pitch = x.stride(0),
               .columns = static_cast<int>(x.size(1))};
  if (p.columns == 0) return sums;
  p.slots = column_slots(call, p.rows, p.columns);
  call.launch(column_sums, p);
  return sums;
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("column_sums", TORCH_BOX(&ak::run_column_sums)); }
