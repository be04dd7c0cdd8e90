// dropout on a GPU: checks, output, launch of dropout/dropout.cu. Operands with gaps are made contiguous first.
#include "dropout/dropout.h"

#include "base/gpu/call.h"
#include "dropout/arguments.h"

namespace ak {
namespace {

Tensor run_dropout(const Tensor& x_in, const Tensor& seed, const std::optional<Tensor> residual_in, const double p,
                   const ScalarType out_dtype) {
  GpuCall call("dropout", {"x"}, x_in);
  check_dropout(x_in, seed, residual_in, p, out_dtype);
  const Tensor x = torch::stable::contiguous(x_in);
  const Tensor residual = residual_in ? torch::stable::contiguous(*residual_in) : x;
  const Tensor out = call.empty({"out"}, x.sizes(), out_dtype);
  const Dropout problem{call.read({"x"}, x),
                        residual_in ? call.read({"residual"}, residual) : nullptr,
                        static_cast<const int64_t*>(call.read({"seed"}, seed)),
                        out.mutable_data_ptr(),
                        dtype_of(x.scalar_type()),
                        dtype_of(residual.scalar_type()),
                        dtype_of(out_dtype),
                        x.numel(),
                        dropout_rate(p)};
  call.launch(dropout, problem);
  return out;
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("dropout", TORCH_BOX(&ak::run_dropout)); }
