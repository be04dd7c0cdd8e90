// norm_forward on a GPU: checks, outputs, launch of norm/forward.cu. Operands with gaps are made contiguous
// first.
#include "norm/forward.h"

#include "base/gpu/call.h"
#include "norm/arguments.h"

namespace ak {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> run_norm_forward(const Tensor& x_in, const std::optional<Tensor> weight_in,
                                                            const std::optional<Tensor> bias_in,
                                                            const std::optional<Tensor> residual_in,
                                                            const std::optional<Tensor> seed, const double eps,
                                                            const bool centred, const ScalarType out_dtype,
                                                            const double dropout_p) {
  constexpr const char* op = "norm_forward";
  GpuCall call(op, {"x"}, x_in);
  check_norm_forward(x_in, weight_in, bias_in, residual_in, seed, dropout_p, out_dtype);
  AK_CHECK(x_in.size(1) <= kMaxColumns, op, ": x must have at most ", kMaxColumns, " columns; got ", x_in.size(1));
  const Tensor x = torch::stable::contiguous(x_in);
  const auto weight = without_gaps(weight_in), bias = without_gaps(bias_in), residual = without_gaps(residual_in);
  const int64_t rows = x.size(0), columns = x.size(1);
  const ScalarType sum_dtype = residual ? residual->scalar_type() : x.scalar_type();
  const Tensor y = call.empty({"y"}, {rows, columns}, out_dtype);
  const Tensor sum = residual ? call.empty({"sum"}, {rows, columns}, sum_dtype) : call.empty({"sum"}, {0}, sum_dtype);
  const Tensor mean = call.empty({"mean"}, {centred ? rows : 0}, ScalarType::Float);
  const Tensor rstd = call.empty({"rstd"}, {rows}, ScalarType::Float);
  const auto type = [](const std::optional<Tensor>& t) { return t ? dtype_of(t->scalar_type()) : DType::kFloat32; };
  const NormForward problem{
      call.read({"x"}, x),
      residual ? call.read({"residual"}, *residual) : nullptr,
      weight ? call.read({"weight"}, *weight) : nullptr,
      bias ? call.read({"bias"}, *bias) : nullptr,
      residual ? sum.mutable_data_ptr() : nullptr,
      y.mutable_data_ptr(),
      centred ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr,
      static_cast<float*>(rstd.mutable_data_ptr()),
      dtype_of(x.scalar_type()),
      type(residual),
      type(weight),
      type(bias),
      dtype_of(out_dtype),
      rows,
      static_cast<int>(columns),
      static_cast<float>(eps),
      {seed ? static_cast<const int64_t*>(call.read({"seed"}, *seed)) : nullptr, dropout_rate(dropout_p)}};
  call.launch(norm_forward, problem);
  return {y, sum, mean, rstd};
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("norm_forward", TORCH_BOX(&ak::run_norm_forward)); }
