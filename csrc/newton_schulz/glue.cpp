// unit_matrices: from the schema to newton_schulz/call.h.
#include <climits>

#include "base/op_call.h"
#include "newton_schulz/call.h"

namespace ak {
namespace {

Tensor run_unit_matrices(const Tensor& x, double eps, ScalarType dtype) {
  constexpr const char* op = "unit_matrices";
  OpCall call(op, {"x"}, x);
  check_dtype(op, {"x"}, x, kNarrowDtypes);
  check_dtype(op, {"dtype"}, dtype, {ScalarType::Half, ScalarType::BFloat16});
  AK_CHECK(x.dim() == 3, op, ": x must have shape (B, M, N); got ", Ints{x.sizes()});
  const auto padded = [](int64_t size) { return (size + 7) / 8 * 8; };
  for (int64_t d = 0; d < 3; ++d)
    AK_CHECK(x.size(d) <= INT_MAX - 7, op, ": a size is ", x.size(d), "; accepted: at most ", INT_MAX - 7);
  const Tensor out = call.empty({"out"}, {x.size(0), padded(x.size(1)), padded(x.size(2))}, dtype);
  if (x.numel() == 0) return out;
  const UnitMatrices p{.x = call.read({"x"}, x),
                       .type = dtype_of(x.scalar_type()),
                       .batch_stride = x.stride(0),
                       .row_stride = x.stride(1),
                       .column_stride = x.stride(2),
                       .batch = static_cast<int>(x.size(0)),
                       .rows = static_cast<int>(x.size(1)),
                       .columns = static_cast<int>(x.size(2)),
                       .eps = eps,
                       .row_sums = static_cast<double*>(call.scratch(static_cast<size_t>(x.size(0) * x.size(1)) * 8)),
                       .out = static_cast<uint16_t*>(out.mutable_data_ptr()),
                       .out_type = dtype_of(dtype),
                       .out_rows = static_cast<int>(out.size(1)),
                       .out_columns = static_cast<int>(out.size(2))};
  call.launch(unit_matrices, p);
  return out;
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("unit_matrices", TORCH_BOX(&ak::run_unit_matrices)); }
