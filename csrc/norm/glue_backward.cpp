// norm_backward on a GPU: checks, outputs, slots, launch of norm/backward.cu. Operands with gaps are made
// contiguous first.
#include "norm/backward.h"

#include "base/gpu/call.h"
#include "norm/arguments.h"
#include "norm/forward.h"

namespace ak {
namespace {

std::tuple<Tensor, Tensor, Tensor> run_norm_backward(
    const Tensor& grad_in, const Tensor& x_in, const Tensor& rstd_in, const std::optional<Tensor> mean_in,
    const std::optional<Tensor> weight_in, const std::optional<Tensor> grad_sum_in, const std::optional<Tensor> seed,
    const int64_t parameters, const double dropout_p, const std::optional<ScalarType> branch_dtype) {
  constexpr const char* op = "norm_backward";
  GpuCall call(op, {"grad"}, grad_in);
  check_norm_backward(grad_in, x_in, rstd_in, mean_in, weight_in, grad_sum_in, seed, parameters, dropout_p,
                      branch_dtype);
  AK_CHECK(x_in.size(1) <= kMaxColumns, op, ": x must have at most ", kMaxColumns, " columns; got ", x_in.size(1));
  const Tensor grad = torch::stable::contiguous(grad_in), x = torch::stable::contiguous(x_in),
               rstd = torch::stable::contiguous(rstd_in);
  const auto mean = without_gaps(mean_in), weight = without_gaps(weight_in), grad_sum = without_gaps(grad_sum_in);
  const int64_t rows = x.size(0);
  const int columns = static_cast<int>(x.size(1)), wanted = static_cast<int>(parameters);
  const Tensor out = call.empty({"grad_x"}, x.sizes(), x.scalar_type());
  const Tensor sums = call.empty({"grad_parameters"}, {parameters, columns}, ScalarType::Float);
  const Tensor branch = branch_dtype ? call.empty({"grad_branch"}, x.sizes(), *branch_dtype)
                                     : call.empty({"grad_branch"}, {0}, x.scalar_type());
  const Tensor slots = call.empty({"slots"}, {norm_backward_slots_size(rows, columns, wanted)}, ScalarType::Float);
  if (rows == 0) call.zero(sums, static_cast<size_t>(sums.numel()) * sizeof(float));
  const auto type = [](const std::optional<Tensor>& t) { return t ? dtype_of(t->scalar_type()) : DType::kFloat32; };
  const NormBackward problem{
      call.read({"grad"}, grad),
      call.read({"x"}, x),
      weight ? call.read({"weight"}, *weight) : nullptr,
      grad_sum ? call.read({"grad_sum"}, *grad_sum) : nullptr,
      mean ? static_cast<const float*>(call.read({"mean"}, *mean)) : nullptr,
      static_cast<const float*>(call.read({"rstd"}, rstd)),
      out.mutable_data_ptr(),
      branch_dtype ? branch.mutable_data_ptr() : nullptr,
      static_cast<float*>(slots.mutable_data_ptr()),
      static_cast<float*>(sums.mutable_data_ptr()),
      dtype_of(grad.scalar_type()),
      dtype_of(x.scalar_type()),
      type(weight),
      type(grad_sum),
      dtype_of(branch.scalar_type()),
      rows,
      columns,
      wanted,
      {seed ? static_cast<const int64_t*>(call.read({"seed"}, *seed)) : nullptr, dropout_rate(dropout_p)}};
  call.launch(norm_backward, problem);
  return {out, sums, branch};
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("norm_backward", TORCH_BOX(&ak::run_norm_backward)); }
