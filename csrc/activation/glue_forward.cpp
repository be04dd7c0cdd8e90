// activation_forward on a GPU: checks, output, launch of activation/forward.cu. An operand with gaps is made
// contiguous first.
#include "activation/forward.h"

#include <string>

#include "activation/arguments.h"
#include "base/gpu/call.h"

namespace ak {
namespace {

Tensor run_activation_forward(const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_forward";
  GpuCall call(op, {"preact"}, preact);
  const Activation activation = activation_named(op, name);
  const std::vector<int64_t> sizes = activated_sizes(op, activation, preact);
  const Tensor z = torch::stable::contiguous(preact);
  const Tensor out = call.empty({"out"}, sizes, z.scalar_type());
  const int64_t columns = z.dim() == 0 ? 1 : z.size(z.dim() - 1);
  const ActivationForward problem{call.read({"preact"}, z),
                                  out.mutable_data_ptr(),
                                  dtype_of(z.scalar_type()),
                                  columns == 0 ? 0 : z.numel() / columns,
                                  columns,
                                  activation};
  call.launch(activation_forward, problem);
  return out;
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) { m.impl("activation_forward", TORCH_BOX(&ak::run_activation_forward)); }
