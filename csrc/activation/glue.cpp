// activation_forward and activation_backward: from the schema to activation/call.h. Operands with gaps are made
// contiguous first.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "activation/call.h"
#include "activation/name.h"
#include "base/op_call.h"
#include "column_sums/glue.h"

namespace ak {
namespace {

// The shape of activation(preact).
std::vector<int64_t> activated_sizes(const char* op, Activation activation, const Tensor& preact) {
  check_dtype(op, {"preact"}, preact, kNarrowDtypes);
  std::vector<int64_t> sizes(preact.sizes().begin(), preact.sizes().end());
  if (is_gated(activation)) {
    AK_CHECK(!sizes.empty() && sizes.back() % 2 == 0, op, ": preact must have an even number of columns with '",
             name_of(activation), "'; got ", Ints{preact.sizes()});
    sizes.back() /= 2;
  }
  return sizes;
}

int64_t columns_of(const Tensor& z) { return z.dim() == 0 ? 1 : z.size(z.dim() - 1); }

Tensor run_activation_forward(const Tensor& preact, std::string name) {
  constexpr const char* op = "activation_forward";
  OpCall call(op, {"preact"}, preact);
  const Activation activation = activation_named(op, name);
  const std::vector<int64_t> sizes = activated_sizes(op, activation, preact);
  const Tensor z = torch::stable::contiguous(preact);
  const Tensor out = call.empty({"out"}, sizes, z.scalar_type());
  const int64_t columns = columns_of(z);
  const ActivationForward p{.z = call.read({"preact"}, z),
                            .out = out.mutable_data_ptr(),
                            .type = dtype_of(z.scalar_type()),
                            .rows = columns == 0 ? 0 : z.numel() / columns,
                            .columns = columns,
                            .activation = activation};
  call.launch(activation_forward, p);
  return out;
}

std::tuple<Tensor, Tensor> run_activation_backward(const Tensor& grad, const Tensor& preact, std::string name,
                                                   bool bias_grad) {
  constexpr const char* op = "activation_backward";
  OpCall call(op, {"preact"}, preact);
  const Activation activation = activation_named(op, name);
  const std::vector<int64_t> sizes = activated_sizes(op, activation, preact);
  check_dtype(op, {"grad"}, grad, {preact.scalar_type(), ScalarType::Float});
  AK_CHECK(grad.sizes().size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), grad.sizes().begin()), op,
           ": grad must have the shape of ", name_of(activation), "(preact), ", Ints{sizes}, "; got ",
           Ints{grad.sizes()});
  const int64_t columns = columns_of(preact);
  AK_CHECK(!bias_grad || (preact.dim() > 0 && columns <= INT32_MAX), op,
           ": preact must have 1 dimension or more and at most ", INT32_MAX, " columns with bias_grad; got shape ",
           Ints{preact.sizes()});
  const Tensor g = torch::stable::contiguous(grad), z = torch::stable::contiguous(preact);
  const Tensor out = call.empty({"out"}, z.sizes(), z.scalar_type());
  ActivationBackward p{.grad = call.read({"grad"}, g),
                       .z = call.read({"preact"}, z),
                       .out = out.mutable_data_ptr(),
                       .grad_type = dtype_of(g.scalar_type()),
                       .type = dtype_of(z.scalar_type()),
                       .rows = columns == 0 ? 0 : z.numel() / columns,
                       .columns = columns,
                       .activation = activation};
  Tensor sums;
#ifdef AK_ON_CPU
  if (bias_grad && aten_sums_columns()) {
    call.launch(activation_backward, p);
    return {out, aten_column_sums(torch::stable::view(out, {p.rows, columns}))};
  }
#endif
  if (bias_grad) {
    sums = call.empty({"sums"}, {columns}, ScalarType::Float);
    p.sums = static_cast<float*>(sums.mutable_data_ptr());
    p.slots = columns == 0 ? nullptr : column_slots(call, p.rows, columns);
  }
  call.launch(activation_backward, p);
  return {out, sums};
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("activation_forward", TORCH_BOX(&ak::run_activation_forward));
  m.impl("activation_backward", TORCH_BOX(&ak::run_activation_backward));
}
