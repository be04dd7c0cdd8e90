// activation_backward on a GPU: checks, output, launch of activation/backward.cu. Operands with gaps are made
// contiguous first.
#include "activation/backward.h"

#include <string>

#include "activation/arguments.h"
#include "base/gpu/call.h"

namespace ak {
namespace {

Tensor run_activation_backward(const Tensor& grad, const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_backward";
  GpuCall call(op, {"preact"}, preact);
  const Activation activation = activation_named(op, name);
  check_activation_gradient(op, activation, grad, preact);
  const Tensor g = torch::stable::contiguous(grad), z = torch::stable::contiguous(preact);
  const Tensor out = call.empty({"out"}, z.sizes(), z.scalar_type());
  const int64_t columns = z.dim() == 0 ? 1 : z.size(z.dim() - 1);
  const ActivationGradient problem{call.read({"grad"}, g),
                                   call.read({"preact"}, z),
                                   out.mutable_data_ptr(),
                                   dtype_of(g.scalar_type()),
                                   dtype_of(z.scalar_type()),
                                   columns == 0 ? 0 : z.numel() / columns,
                                   columns,
                                   activation};
  call.launch(activation_backward, problem);
  return out;
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("activation_backward", TORCH_BOX(&ak::run_activation_backward)); }
