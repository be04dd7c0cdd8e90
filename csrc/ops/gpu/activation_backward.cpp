// activation_backward on a GPU: checks, output, launch of kernels/activation_backward.cu. Operands with gaps are made
// contiguous first.
#include "kernels/activation_backward.h"

#include <string>
#include <vector>

#include "ops/activation.h"
#include "ops/gpu/call.h"

namespace ak {
namespace {

Tensor run_activation_backward(const Tensor& grad, const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_backward";
  GpuCall call(op, {"preact"}, preact);
  check_dtype(op, {"preact"}, preact, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_dtype(op, {"grad"}, grad, {preact.scalar_type(), ScalarType::Float});
  const Activation activation = activation_named(op, name);
  std::vector<int64_t> sizes(preact.sizes().begin(), preact.sizes().end());
  if (is_gated(activation)) {
    AK_CHECK(!sizes.empty() && sizes.back() % 2 == 0, op, ": preact must have an even number of columns with '", name,
             "'; got ", Ints{preact.sizes()});
    sizes.back() /= 2;
  }
  AK_CHECK(grad.sizes().size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), grad.sizes().begin()), op,
           ": grad must have the shape of ", name, "(preact), ", Ints{sizes}, "; got ", Ints{grad.sizes()});
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
