// column_sums: from the schema to column_sums/call.h. Matrices whose rows have gaps are made contiguous first.
#include "column_sums/call.h"

#include "base/op_call.h"
#ifdef AK_ON_CPU
#include <torch/csrc/stable/ops.h>

#include "base/cpu/isa.h"
#endif

namespace ak {
namespace {

Tensor run_column_sums(const Tensor& x_in) {
  constexpr const char* op = "column_sums";
  OpCall call(op, {"x"}, x_in);
  check_dtype(op, {"x"}, x_in, kNarrowDtypes);
  AK_CHECK(x_in.dim() == 2 && x_in.size(1) <= INT32_MAX, op, ": x must be a matrix of at most ", INT32_MAX,
           " columns; got shape ", Ints{x_in.sizes()});
#ifdef AK_ON_CPU
  if (current_isa() == Isa::portable) {  // ATen's bits
    const int64_t dim = 0;
    return torch::stable::sum(x_in, torch::headeronly::IntHeaderOnlyArrayRef(&dim, 1), false, ScalarType::Float);
  }
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
  const int64_t shares = ColumnStrips(p.rows, p.columns).shares;
  if (!call.kOnCpu && shares > 1)
    p.slots = static_cast<float*>(call.scratch(static_cast<size_t>(shares * p.columns) * 4));
  call.launch(column_sums, p);
  return sums;
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("column_sums", TORCH_BOX(&ak::run_column_sums)); }
