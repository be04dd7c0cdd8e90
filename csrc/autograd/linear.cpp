// linear and matmul, on a CPU and on GPUs that the CUDA kernels serve. Specification: amp_kernels/ops/_linear.py and
// _products.py.
//
// On a CPU the 16-bit copy of a leaf that requires grad comes from autocast's own cache, so that a weight that is used
// several times within a region is cast once, and torch's ops share the copy. Unlike torch's, a copy of a weight that
// has been written since is not used.
#include <ATen/autocast_mode.h>

#include "autograd/functions.h"
#include "autograd/node.h"
#include "autograd/product.h"

namespace ak {
namespace {

struct Product {
  const Function* function;
  const Tensor &a, &b;  // b is [n, k] if transposed, else [k, n]
  bool transposed;
  std::optional<Tensor> bias, shadow;
  Activation activation;
};

// Its outputs are the result, the pre-activation and the 16-bit copies of a and b, if they exist. As outputs the copies
// carry their dependence on the inputs into a recorded backward, and no fp32 copy need be kept for it. It saves the
// copies, the pre-activation and the weight.
struct ProductNode : FormulaNode {
  bool transposed;
  Activation activation;
  ScalarType compute_type;
  c10::SmallVector<ScalarType, 3> input_types;  // of a, b and bias
  at::DimVector a_shape;

  ProductNode(const Product& p, ScalarType dtype)
      : FormulaNode(*p.function, p.bias ? torch::autograd::collect_next_edges(p.a, p.b, *p.bias)
                                        : torch::autograd::collect_next_edges(p.a, p.b)),
        transposed(p.transposed),
        activation(p.activation),
        compute_type(dtype),
        input_types{p.a.scalar_type(), p.b.scalar_type()},
        a_shape(p.a.sizes()) {
    if (p.bias) input_types.push_back(p.bias->scalar_type());
  }

  std::vector<c10::IValue> options() const override {
    c10::List<std::string> types;
    for (ScalarType type : input_types) types.push_back(dtype_name(type));
    return {types, at::IntArrayRef(a_shape), dtype_name(compute_type), name_of(activation)};
  }

  bool takes(const variable_list& grads) const override {
    return is_alone(grads) && is_plain(grads[0]) && grads[0].scalar_type() == compute_type;
  }

  // Nothing if a size is too large for the kernels.
  variable_list plainly(const variable_list& grads, const variable_list& saved) override {
    const Tensor &a16 = saved[0], &b16 = saved[1], &preact = saved[2];
    variable_list result(input_types.size());
    const bool needs_bias = result.size() > 2 && task_should_compute_output(2);
    const auto [dz, sums] = preactivation_gradient(grads[0], preact, activation, needs_bias);
    if (task_should_compute_output(0)) {
      const Matrix b(b16);
      result[0] = multiply(dz, transposed ? b : b.t(), input_types[0], a_shape);
      if (!result[0].defined()) return {};
    }
    if (task_should_compute_output(1)) {
      const Matrix a(a16);
      const int64_t sizes[2] = {transposed ? dz.columns : a.columns, 0};
      result[1] = transposed ? multiply(dz.t(), a, input_types[1], sizes) : multiply(a.t(), dz, input_types[1], sizes);
      if (!result[1].defined()) return {};
    }
    if (needs_bias) result[2] = sums.to(input_types[2]);
    return result;
  }
};

// The dtype to work in, or none where the call is not plain.
std::optional<ScalarType> plain_dtype(const Product& p, bool autocast) {
  const at::Device device = p.a.device();
  const auto is_plain_there = [&](const Tensor& t) { return is_plain(t) && t.device() == device; };
  const ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(device.type()) : p.a.scalar_type();
  const ScalarType a = p.a.scalar_type(), b = p.b.scalar_type();
  if (!is_half(dtype) || !(autocast ? is_narrow(a) && is_narrow(b) : a == b)) return std::nullopt;
  if (!nothing_between() || !is_plain(p.a) || !is_plain_there(p.b)) return std::nullopt;
  if (p.b.dim() != 2 || p.a.dim() < (p.transposed ? 1 : 2)) return std::nullopt;
  const int64_t n = p.b.size(p.transposed ? 0 : 1), k = p.b.size(p.transposed ? 1 : 0);
  if (p.a.size(-1) != k || (is_gated(p.activation) && n % 2)) return std::nullopt;
  if (p.bias) {
    const ScalarType type = p.bias->scalar_type();
    if (!is_plain_there(*p.bias) || (type != ScalarType::Float && type != dtype)) return std::nullopt;
    if (p.bias->dim() != 1 || p.bias->size(0) != n || !has_own_grad_dtype(*p.bias)) return std::nullopt;
  }
  if (p.shadow &&
      (!is_plain_there(*p.shadow) || p.shadow->scalar_type() != dtype || !p.shadow->sizes().equals(p.b.sizes())))
    return std::nullopt;
  if (!has_own_grad_dtype(p.a) || !has_own_grad_dtype(p.b)) return std::nullopt;
  return dtype;
}

// The result, or an undefined tensor where the call is not plain.
Tensor run(const Product& p) {
  if (!is_served(p.a.device())) return {};
  const bool autocast = at::autocast::is_autocast_enabled(p.a.device().type());
  const std::optional<ScalarType> dtype = plain_dtype(p, autocast);
  if (!dtype) return {};
  const bool a_grad = p.a.requires_grad(), b_grad = p.b.requires_grad();
  const bool recorded = is_recorded(p.a, p.b, p.bias ? *p.bias : Tensor());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Copy a = cast(p.a, *dtype, autocast);
  const Copy b = p.shadow ? Copy{*p.shadow, true} : cast(p.b, *dtype, autocast);
  const bool with_preact = recorded && p.activation != Activation::none;
  Tensor out, preact;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Matrix rows(a.tensor), weight(b.tensor);
    std::tie(out, preact) =
        multiply(rows, p.transposed ? weight.t() : weight, p.bias, p.activation, with_preact, *dtype, p.a.sizes());
  }
  if (!recorded || !out.defined()) return out;

  const auto node = hold(new ProductNode(p, *dtype));
  const bool own_a = a_grad && b_grad && !a.reaches, own_b = a_grad && b_grad && !b.reaches;
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(preact, node);
  torch::autograd::set_history(own_a ? a.tensor : Tensor(), node);
  torch::autograd::set_history(own_b ? b.tensor : Tensor(), node);
  node->save(b_grad ? a.tensor : Tensor(), own_a);
  node->save(a_grad ? b.tensor : Tensor(), own_b);
  node->save(preact, /*is_output=*/true);
  // Beside its shadow, for a recorded backward, which must reach the weight itself.
  node->save(a_grad && p.shadow ? p.b : Tensor());
  return out;
}

}  // namespace

PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !is_tensor(args[0]) || !is_tensor(args[1]) || !is_tensor_or_none(args[2]) ||
      !is_tensor_or_none(args[3]) || !PyUnicode_Check(args[4]))
    Py_RETURN_NONE;
  const std::optional<Activation> activation = find_activation(PyUnicode_AsUTF8(args[4]));
  if (!activation) Py_RETURN_NONE;
  return wrapped_or_none([&] {
    return run({&linear_function, THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), true,
                optional_tensor(args[2]), optional_tensor(args[3]), *activation});
  });
  END_HANDLE_TH_ERRORS
}

PyObject* matmul(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !is_tensor(args[0]) || !is_tensor(args[1])) Py_RETURN_NONE;
  return wrapped_or_none([&] {
    return run({&matmul_function, THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), false, std::nullopt,
                std::nullopt, Activation::none});
  });
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
