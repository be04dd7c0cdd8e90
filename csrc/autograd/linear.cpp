// The Python module _nodes: linear and matmul, and by nodes_rows.h norms, softmax and cross-entropy, in C++ for the
// plain case, their autograd nodes included.
//
// Optional. It is compiled against the installed torch, whose C++ interface holds no promise between versions, and
// loaded by that very version alone (amp_kernels/_dispatch/nodes.py). What it saves is host time: the autograd node and
// the checks of a call cost 15 us in Python and 3 us here, which is most of what a small layer costs, on a CPU as on a
// GPU, which waits for its host there.
//
// The Python functions (amp_kernels/ops/linear.py, _products.py) are the specification. A call is plain if it is eager,
// on dense tensors of no subclass, on a CPU or on one GPU that the CUDA kernels serve, with nothing between it and the
// kernels: no mode, no transform, no tracer, no backend of the user's choice, and on a CPU instructions of the machine
// (gemm_isa.h). For any other, and for any that is wrong, linear() and matmul() return None before they did anything,
// and the Python function answers, in results or in words; so it does where memory runs out.
// The backward decides anew: a recorded one (create_graph=True), or one under a mode, runs the Python formula over what
// the node has saved.
//
// On a CPU the 16-bit copy of a leaf that requires grad comes from autocast's own cache, so that a weight that is used
// several times within a region is cast once, and torch's ops share the copy. Unlike torch's, a copy of a weight that
// has been written since is not used.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "autograd/gradient_table.h"
#include "autograd/plain.h"
#include "autograd/product.h"
#include "autograd/rows_node.h"

namespace ak {
namespace {

// ---- the node

// Outputs are the result, the pre-activation and the 16-bit copies of a and b, as far as they exist: as outputs of this
// node these carry their dependence on the inputs into a recorded backward, and no fp32 copy need be kept for it.
struct ProductNode : torch::autograd::Node {
  const Function* function;
  bool transposed;  // b is the weight of a linear layer: [n, k]
  Activation activation;
  ScalarType compute_type;
  std::vector<ScalarType> input_types;  // of a, b and bias
  std::vector<int64_t> a_shape;
  bool own_a, own_b;  // the copies are outputs of this node
  SavedVariable a16_, b16_, preact_;
  SavedVariable weight_;  // beside its shadow, for a recorded backward, which must reach the weight itself

  std::string name() const override { return function->name; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&a16_, &b16_, &preact_, &weight_}) saved->reset_data();
  }

  // Compiled autograd traces a backward once: what it depends on,
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(a16_, own_a);
    args.collect(b16_, own_b);
    args.collect(preact_, true);
    args.collect(weight_, false);
    args.collect(std::string(function->name));
    args.collect(static_cast<int64_t>(activation));
    args.collect(compute_type);
    args.collect(input_types);
    args.collect(a_shape);
  }

  // and a call in its graph, which runs the formula.
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    const auto each = {&a16_, &b16_, &preact_, &weight_};
    for (SavedVariable* variable : each) saved.before(*variable);
    c10::List<bool> are_defined;
    c10::List<int64_t> types;
    for (ScalarType type : input_types) types.push_back(static_cast<int64_t>(type));
    std::vector<c10::IValue> args{
        transposed, static_cast<int64_t>(activation), static_cast<int64_t>(compute_type), types, a_shape, needs()};
    variable_list values;
    for (SavedVariable* variable : each) {
      const Tensor value = variable->unpack(getptr());
      are_defined.push_back(value.defined());
      if (value.defined()) values.push_back(value);
    }
    args.emplace_back(are_defined);
    args.insert(args.end(), values.begin(), values.end());
    variable_list grads = call_in_graph(*this, traced, inputs, args, saved);
    for (SavedVariable* variable : each) saved.after(*variable);
    return grads;
  }

  static variable_list traced(const variable_list& grads, const std::vector<c10::IValue>& args) {
    ProductNode node;
    node.transposed = args[0].toBool();
    node.function = node.transposed ? &linear_function : &matmul_function;
    node.activation = static_cast<Activation>(args[1].toInt());
    node.compute_type = static_cast<ScalarType>(args[2].toInt());
    for (int64_t type : args[3].toIntVector()) node.input_types.push_back(static_cast<ScalarType>(type));
    node.a_shape = args[4].toIntVector();
    variable_list saved;
    size_t next = 7;
    for (bool defined : args[6].toBoolList()) saved.push_back(defined ? args[next++].toTensor() : Tensor());
    return node.by_formula(grads, saved, args[5].toBoolList().vec());
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto self = getptr();
    const Tensor a16 = a16_.unpack(self), b16 = b16_.unpack(self), preact = preact_.unpack(self);
    const Tensor weight = weight_.unpack(self);
    const bool only_result = !grads[1].defined() && !grads[2].defined() && !grads[3].defined();
    if (only_result && !grads[0].defined()) return variable_list(input_types.size());
    if (!only_result || torch::autograd::GradMode::is_enabled() || !nothing_between() || !is_plain(grads[0]) ||
        grads[0].scalar_type() != compute_type)
      return by_formula(grads, {a16, b16, preact, weight}, needs());
    variable_list result;
    try {
      result = plainly(grads[0], a16, b16, preact);
    } catch (const std::exception&) {  // there is no memory, as a rule: the formula has the words for it
    }
    return result.empty() ? by_formula(grads, {a16, b16, preact, weight}, needs()) : result;
  }

  std::vector<bool> needs() const {
    std::vector<bool> inputs(input_types.size());
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = task_should_compute_output(i);
    return inputs;
  }

  // Empty on the portable path.
  variable_list plainly(const Tensor& grad, const Tensor& a16, const Tensor& b16, const Tensor& preact) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    variable_list result(input_types.size());
    const bool needs_bias = result.size() > 2 && task_should_compute_output(2);
    const auto gradient = preactivation_gradient(grad, preact, activation, needs_bias);
    if (!gradient) return {};
    const auto& [dz, sums] = *gradient;
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

  // backward(grads, saved, needs_input_grad, input_dtypes, a_shape, compute_dtype, activation) -> a gradient per input.
  variable_list by_formula(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const py::gil_scoped_acquire gil;
    const py::tuple types{py::cast(input_types)}, needs_input_grad{py::cast(needed)}, shape{py::cast(a_shape)};
    const py::tuple found =
        py::handle(function->backward)(objects_of(grads), objects_of(saved), needs_input_grad, types, shape,
                                       py::cast(compute_type), activation_name(activation));
    variable_list result(input_types.size());
    for (size_t i = 0; i < result.size(); ++i) {
      if (!found[i].is_none()) result[i] = found[i].cast<Tensor>();
    }
    return result;
  }
};

// ---- the functions

struct Product {
  const Function* function;
  const Tensor &a, &b;  // b is [n, k] if transposed, else [k, n]
  bool transposed;
  std::optional<Tensor> bias, shadow;
  Activation activation;
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
  const bool recorded =
      torch::autograd::GradMode::is_enabled() && (a_grad || b_grad || (p.bias && p.bias->requires_grad()));
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

  const auto node = hold(new ProductNode);
  node->set_next_edges(p.bias ? torch::autograd::collect_next_edges(p.a, p.b, *p.bias)
                              : torch::autograd::collect_next_edges(p.a, p.b));
  node->function = p.function;
  node->transposed = p.transposed;
  node->activation = p.activation;
  node->compute_type = *dtype;
  node->input_types = {p.a.scalar_type(), p.b.scalar_type()};
  if (p.bias) node->input_types.push_back(p.bias->scalar_type());
  node->a_shape = p.a.sizes().vec();
  node->own_a = a_grad && b_grad && !a.reaches;
  node->own_b = a_grad && b_grad && !b.reaches;
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(preact, node);
  torch::autograd::set_history(node->own_a ? a.tensor : Tensor(), node);
  torch::autograd::set_history(node->own_b ? b.tensor : Tensor(), node);
  if (b_grad) node->a16_ = SavedVariable(a.tensor, node->own_a);
  if (a_grad) node->b16_ = SavedVariable(b.tensor, node->own_b);
  if (with_preact) node->preact_ = SavedVariable(preact, true);
  if (a_grad && p.shadow) node->weight_ = SavedVariable(p.b, false);
  return out;
}

// ---- Python

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

// bind(name, formula): the Python backward of a function's nodes.
PyObject* bind(PyObject*, PyObject* const* args, Py_ssize_t) {
  for (Function* function : functions) {
    if (PyUnicode_CompareWithASCIIString(args[0], function->key) == 0) function->backward = Py_NewRef(args[1]);
  }
  Py_RETURN_NONE;
}

// refuse(+1), refuse(-1): a block begins, or ends, in which no call is plain. A count, as they may end in any order.
PyObject* refuse(PyObject*, PyObject* change) {
  refusals += static_cast<int>(PyLong_AsLong(change));
  Py_RETURN_NONE;
}

// serve_gpu(index): products of the CUDA device may be plain.
PyObject* serve_gpu(PyObject*, PyObject* index) {
  const long number = PyLong_AsLong(index);
  if (0 <= number && number < 64) gpus |= uint64_t{1} << number;
  Py_RETURN_NONE;
}

template <typename F>
PyCFunction as_method(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"linear", as_method(linear), METH_FASTCALL, "linear(x, weight, bias, shadow, activation): None if not plain."},
    {"matmul", as_method(matmul), METH_FASTCALL, "matmul(a, b): None if not plain."},
    {"norm", as_method(norm), METH_FASTCALL, "norm(x, shape, weight, bias, eps, centred): None if not plain."},
    {"softmax", as_method(softmax), METH_FASTCALL, "softmax(x, dim, log): None if not plain."},
    {"cross_entropy", as_method(cross_entropy), METH_FASTCALL,
     "cross_entropy(logits, target, ignore_index, reduction, label_smoothing, z_loss): None if not plain."},
    {"cast_lists", as_method(cast_lists), METH_FASTCALL,
     "cast_lists(destinations, sources): True when done, None if not plain."},
    {"bind", as_method(bind), METH_FASTCALL, "bind(name, formula): the Python backward of a function's nodes."},
    {"refuse", refuse, METH_O, "refuse(+1 or -1): a block begins, or ends, in which no call is plain."},
    {"serve_gpu", serve_gpu, METH_O, "serve_gpu(index): products of this CUDA device may be plain from now on."},
    {"remember_tensors", as_method(remember_tensors), METH_FASTCALL, "See gradient_table.h."},
    {"refresh_addresses", as_method(refresh_addresses), METH_FASTCALL, "See gradient_table.h."},
    {"same_objects", as_method(same_objects), METH_FASTCALL, "See gradient_table.h."},
    {"same_versions", as_method(same_versions), METH_FASTCALL, "See gradient_table.h."},
    {"note_versions", as_method(note_versions), METH_FASTCALL, "See gradient_table.h."},
    {"bump_versions", as_method(bump_versions), METH_FASTCALL, "See gradient_table.h."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module{PyModuleDef_HEAD_INIT, "_nodes", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ak

PyMODINIT_FUNC PyInit__nodes() { return PyModule_Create(&ak::module); }
