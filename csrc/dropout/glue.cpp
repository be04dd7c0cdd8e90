// dropout: from the schema to dropout/call.h. Operands with gaps are made contiguous first.
#include "base/op_call.h"
#include "dropout/call.h"

namespace ak {
namespace {

Tensor run_dropout(const Tensor& x_in, const Tensor& seed, const std::optional<Tensor> residual_in, const double p,
                   const ScalarType out_dtype) {
  constexpr const char* op = "dropout";
  OpCall call(op, {"x"}, x_in);
  check_dtype(op, {"x"}, x_in, kNarrowDtypes);
  AK_CHECK(p >= 0.0 && p <= 1.0, op, ": p must be from 0 to 1; got ", p);
  check_one_element(op, {"seed"}, seed, ScalarType::Long);
  if (residual_in) {
    check_dtype(op, {"residual"}, *residual_in, kNarrowDtypes);
    AK_CHECK(same_sizes(*residual_in, x_in), op, ": residual must have the shape of x, ", Ints{x_in.sizes()}, "; got ",
             Ints{residual_in->sizes()});
  }
  check_dtype(op, {"out_dtype"}, out_dtype, kNarrowDtypes);
  const Tensor x = torch::stable::contiguous(x_in);
  const Tensor residual = residual_in ? torch::stable::contiguous(*residual_in) : x;
  const Tensor out = call.empty({"out"}, x.sizes(), out_dtype);
  const Dropout problem{.x = call.read({"x"}, x),
                        .residual = residual_in ? call.read({"residual"}, residual) : nullptr,
                        .seed = call.read<int64_t>({"seed"}, seed),
                        .out = out.mutable_data_ptr(),
                        .x_type = dtype_of(x.scalar_type()),
                        .residual_type = dtype_of(residual.scalar_type()),
                        .out_type = dtype_of(out_dtype),
                        .count = x.numel(),
                        .rate = dropout_rate(p)};
  call.launch(dropout, problem);
  return out;
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("dropout", TORCH_BOX(&ak::run_dropout)); }
