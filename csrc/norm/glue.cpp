// norm_forward and norm_backward: from the schema to norm/call.h. Operands with gaps are made contiguous first.
#include "base/op_call.h"
#include "norm/call.h"

namespace ak {
namespace {

int check_rows(const char* op, const Tensor& x) {
  check_dtype(op, {"x"}, x, kNarrowDtypes);
  AK_CHECK(x.dim() == 2 && x.size(1) > 0, op, ": x must have shape (rows, columns), columns > 0; got ",
           Ints{x.sizes()});
  AK_CHECK(x.size(1) <= kMaxColumns, op, ": x must have at most ", kMaxColumns, " columns; got ", x.size(1));
  return static_cast<int>(x.size(1));
}

// A dense operand, checked: of the shape of x, one value per column or one per row.
std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional(torch::stable::contiguous(*t)) : std::nullopt;
}
std::optional<Tensor> like_x(const char* op, ArgName name, const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  check_dtype(op, name, *t, kNarrowDtypes);
  AK_CHECK(same_sizes(*t, x), op, ": ", name, " must have the shape of x, ", Ints{x.sizes()}, "; got ",
           Ints{t->sizes()});
  return dense(t);
}
std::optional<Tensor> per_column(const char* op, ArgName name, const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  check_dtype(op, name, *t, kNarrowDtypes);
  AK_CHECK(t->dim() == 1 && t->size(0) == x.size(1), op, ": ", name, " must have shape (", x.size(1), "); got ",
           Ints{t->sizes()});
  return dense(t);
}
std::optional<Tensor> per_row(const char* op, ArgName name, const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  check_dtype(op, name, *t, {ScalarType::Float});
  AK_CHECK(t->dim() == 1 && t->size(0) == x.size(0), op, ": ", name, " must have shape (", x.size(0), "); got ",
           Ints{t->sizes()});
  return dense(t);
}

DType type_of(const std::optional<Tensor>& t) { return t ? dtype_of(t->scalar_type()) : DType::kFloat32; }

std::tuple<Tensor, Tensor, Tensor, Tensor> run_norm_forward(const Tensor& x_in, const std::optional<Tensor> weight_in,
                                                            const std::optional<Tensor> bias_in,
                                                            const std::optional<Tensor> residual_in, const double eps,
                                                            const bool centred, const ScalarType out_dtype) {
  constexpr const char* op = "norm_forward";
  OpCall call(op, {"x"}, x_in);
  const int columns = check_rows(op, x_in);
  const Tensor x = torch::stable::contiguous(x_in);
  const auto weight = per_column(op, {"weight"}, weight_in, x), bias = per_column(op, {"bias"}, bias_in, x),
             residual = like_x(op, {"residual"}, residual_in, x);
  check_dtype(op, {"out_dtype"}, out_dtype, kNarrowDtypes);
  const int64_t rows = x.size(0);
  const Tensor y = call.empty({"y"}, x.sizes(), out_dtype);
  const Tensor sum =
      residual ? call.empty({"sum"}, x.sizes(), residual->scalar_type()) : call.empty({"sum"}, {0}, x.scalar_type());
  const Tensor mean = call.empty({"mean"}, {centred ? rows : 0}, ScalarType::Float);
  const Tensor rstd = call.empty({"rstd"}, {rows}, ScalarType::Float);
  const NormForward p{.x = call.read({"x"}, x),
                      .residual = call.read({"residual"}, residual),
                      .weight = call.read({"weight"}, weight),
                      .bias = call.read({"bias"}, bias),
                      .sum = residual ? sum.mutable_data_ptr() : nullptr,
                      .y = y.mutable_data_ptr(),
                      .mean = centred ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr,
                      .rstd = static_cast<float*>(rstd.mutable_data_ptr()),
                      .x_type = dtype_of(x.scalar_type()),
                      .residual_type = type_of(residual),
                      .weight_type = type_of(weight),
                      .bias_type = type_of(bias),
                      .y_type = dtype_of(out_dtype),
                      .rows = rows,
                      .columns = columns,
                      .eps = static_cast<float>(eps)};
  call.launch(norm_forward, p);
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> run_norm_backward(const Tensor& grad_in, const Tensor& x_in, const Tensor& rstd_in,
                                                     const std::optional<Tensor> mean_in,
                                                     const std::optional<Tensor> weight_in,
                                                     const std::optional<Tensor> grad_sum_in, const int64_t parameters,
                                                     const std::optional<ScalarType> branch_dtype) {
  constexpr const char* op = "norm_backward";
  OpCall call(op, {"grad"}, grad_in);
  const int columns = check_rows(op, x_in);
  const Tensor x = torch::stable::contiguous(x_in);
  const auto grad = like_x(op, {"grad"}, grad_in, x), grad_sum = like_x(op, {"grad_sum"}, grad_sum_in, x),
             weight = per_column(op, {"weight"}, weight_in, x), rstd = per_row(op, {"rstd"}, rstd_in, x),
             mean = per_row(op, {"mean"}, mean_in, x);
  if (branch_dtype) check_dtype(op, {"branch_dtype"}, *branch_dtype, kNarrowDtypes);
  AK_CHECK(parameters >= 0 && parameters <= 2, op, ": parameters must be 0, 1 or 2; got ", parameters);
  const int64_t rows = x.size(0);
  const int wanted = static_cast<int>(parameters);
  const Tensor out = call.empty({"grad_x"}, x.sizes(), x.scalar_type());
  const Tensor sums = call.empty({"grad_parameters"}, {parameters, columns}, ScalarType::Float);
  const Tensor branch = branch_dtype ? call.empty({"grad_branch"}, x.sizes(), *branch_dtype)
                                     : call.empty({"grad_branch"}, {0}, x.scalar_type());
  if (rows == 0) call.zero(sums, static_cast<size_t>(sums.numel()) * sizeof(float));
  const size_t slots = static_cast<size_t>(norm_backward_slots(rows, columns, wanted));
  const NormBackward p{.grad = call.read({"grad"}, grad),
                       .x = call.read({"x"}, x),
                       .weight = call.read({"weight"}, weight),
                       .grad_sum = call.read({"grad_sum"}, grad_sum),
                       .mean = call.read<float>({"mean"}, mean),
                       .rstd = call.read<float>({"rstd"}, rstd),
                       .out = out.mutable_data_ptr(),
                       .branch = branch_dtype ? branch.mutable_data_ptr() : nullptr,
                       .slots = static_cast<float*>(call.scratch(slots * sizeof(float))),
                       .sums = static_cast<float*>(sums.mutable_data_ptr()),
                       .grad_type = type_of(grad),
                       .x_type = dtype_of(x.scalar_type()),
                       .weight_type = type_of(weight),
                       .grad_sum_type = type_of(grad_sum),
                       .branch_type = dtype_of(branch.scalar_type()),
                       .rows = rows,
                       .columns = columns,
                       .parameters = wanted};
  call.launch(norm_backward, p);
  return {out, sums, branch};
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("norm_forward", TORCH_BOX(&ak::run_norm_forward));
  m.impl("norm_backward", TORCH_BOX(&ak::run_norm_backward));
}
