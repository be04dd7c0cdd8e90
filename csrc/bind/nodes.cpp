// The Python module _nodes: linear and matmul in C++ for the plain case, their autograd node included.
//
// Optional. It is compiled against the installed torch, whose C++ interface holds no promise between versions, and
// loaded by that very version alone (amp_kernels/_dispatch/nodes.py). What it saves is host time: the autograd node and
// the checks of a call cost 15 us in Python and 3 us here, which is most of what a small layer costs.
//
// The Python functions (amp_kernels/ops/linear.py, _products.py) are the specification. A call is plain if it is eager,
// on dense CPU tensors of no subclass, with nothing between it and the kernels: no mode, no transform, no tracer, no
// backend of the user's choice, and instructions of the machine (gemm_isa.h). For any other, and for any that is wrong,
// linear() and matmul() return None before they did anything, and the Python function answers, in results or in words.
// The backward decides anew: a recorded one (create_graph=True), or one under a mode, runs the Python formula over what
// the node has saved.
//
// The 16-bit copy of a leaf that requires grad comes from autocast's own cache, so that a weight that is used several
// times within a region is cast once, and torch's ops share the copy. Unlike torch's, a copy of a weight that has been
// written since is not used.
#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "bind/nodes_product.h"

namespace ak {
namespace {

namespace py = pybind11;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

std::atomic<bool> allowed{true};  // false while the user has chosen a backend

// ---- what is plain

bool is_half(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }
bool is_narrow(ScalarType type) { return is_half(type) || type == ScalarType::Float; }

bool nothing_between() {
  static constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode};
  const char* backend = std::getenv("AMP_KERNELS_BACKEND");
  return allowed && !(backend && *backend) && !at::globalContext().deterministicAlgorithms() &&
         !c10::impl::dispatch_mode_enabled() && at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         (c10::impl::tls_local_dispatch_key_set().included_ & kTransforms).empty() && !torch::jit::tracer::isTracing();
}

// A CPU tensor as the kernels know it: not sparse, quantised, nested, conjugate, wrapped, fake.
bool is_plain(const Tensor& t) {
  static constexpr c10::DispatchKeySet kPlain{c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                              c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU};
  return (t.key_set() | kPlain) == kPlain && t.layout() == at::kStrided;
}

// Whether a gradient is wanted in the dtype of `parameter`: a leaf may ask for another one.
bool has_own_grad_dtype(const Tensor& parameter) {
  if (!is_half(parameter.scalar_type()) || !parameter.requires_grad() || !parameter.is_leaf()) return true;
  return parameter.grad_dtype() == parameter.scalar_type();
}

const char* activation_name(Activation activation) { return kActivationNames[static_cast<int>(activation)]; }

// ---- the node

// Which public function a node is of: its name in a graph, and the Python backward for what is not plain.
struct Function {
  const char* name;
  PyObject* backward = nullptr;  // lives as long as the interpreter
};
Function linear_function{"_LinearBackward"}, matmul_function{"MatmulBackward"};

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
      const Tensor value = variable->unpack(shared_from_this());
      are_defined.push_back(value.defined());
      if (value.defined()) values.push_back(value);
    }
    args.emplace_back(are_defined);
    args.insert(args.end(), values.begin(), values.end());
    std::vector<at::TypePtr> schema;
    for (const c10::IValue& arg : args) schema.push_back(arg.isTensor() ? at::TensorType::get() : arg.type());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string call =
        compiler->bind_function(saved.get_py_compiler(), function->name, traced, schema, /*is_custom_function=*/true,
                                /*is_traceable=*/false);
    const auto metadata =
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges()));
    variable_list grads =
        compiler->call_function(saved.get_py_compiler(), "apply_functional", call, inputs, args, metadata);
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
    const std::shared_ptr<Node> self = shared_from_this();
    const Tensor a16 = a16_.unpack(self), b16 = b16_.unpack(self), preact = preact_.unpack(self);
    const Tensor weight = weight_.unpack(self);
    const bool only_result = !grads[1].defined() && !grads[2].defined() && !grads[3].defined();
    if (only_result && !grads[0].defined()) return variable_list(input_types.size());
    if (!only_result || torch::autograd::GradMode::is_enabled() || !nothing_between() || !is_plain(grads[0]) ||
        grads[0].scalar_type() != compute_type)
      return by_formula(grads, {a16, b16, preact, weight}, needs());
    variable_list result = plainly(grads[0], a16, b16, preact);
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
    const Matrix dz(activation == Activation::none ? grad : activation_backward(grad, preact));
    variable_list result(input_types.size());
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
    if (result.size() > 2 && task_should_compute_output(2))
      result[2] = at::sum(dz.tensor, {0}, /*keepdim=*/false, at::kFloat).to(input_types[2]);
    return result;
  }

  Tensor activation_backward(const Tensor& grad, const Tensor& preact) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("amp_kernels::activation_backward", "")
                               .typed<Tensor(const Tensor&, const Tensor&, c10::string_view)>();
    return op.call(grad, preact, activation_name(activation));
  }

  // backward(grads, saved, needs_input_grad, input_dtypes, a_shape, compute_dtype, activation) -> a gradient per input.
  variable_list by_formula(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const py::gil_scoped_acquire gil;
    const auto objects = [](const variable_list& tensors) {
      py::tuple all(tensors.size());
      for (size_t i = 0; i < tensors.size(); ++i) all[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::none();
      return all;
    };
    const py::tuple types{py::cast(input_types)}, needs_input_grad{py::cast(needed)}, shape{py::cast(a_shape)};
    const py::tuple found = py::handle(function->backward)(objects(grads), objects(saved), needs_input_grad, types,
                                                           shape, py::cast(compute_type), activation_name(activation));
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
  const ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(at::kCPU) : p.a.scalar_type();
  const ScalarType a = p.a.scalar_type(), b = p.b.scalar_type();
  if (!is_half(dtype) || !(autocast ? is_narrow(a) && is_narrow(b) : a == b)) return std::nullopt;
  if (!nothing_between() || !is_plain(p.a) || !is_plain(p.b)) return std::nullopt;
  if (p.b.dim() != 2 || p.a.dim() < (p.transposed ? 1 : 2)) return std::nullopt;
  const int64_t n = p.b.size(p.transposed ? 0 : 1), k = p.b.size(p.transposed ? 1 : 0);
  if (p.a.size(-1) != k || (is_gated(p.activation) && n % 2)) return std::nullopt;
  if (p.bias) {
    const ScalarType type = p.bias->scalar_type();
    if (!is_plain(*p.bias) || (type != ScalarType::Float && type != dtype)) return std::nullopt;
    if (p.bias->dim() != 1 || p.bias->size(0) != n || !has_own_grad_dtype(*p.bias)) return std::nullopt;
  }
  if (p.shadow && (!is_plain(*p.shadow) || p.shadow->scalar_type() != dtype || !p.shadow->sizes().equals(p.b.sizes())))
    return std::nullopt;
  if (!has_own_grad_dtype(p.a) || !has_own_grad_dtype(p.b)) return std::nullopt;
  return dtype;
}

// The result, or an undefined tensor where the call is not plain.
Tensor run(const Product& p) {
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
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

  const std::shared_ptr<ProductNode> node(new ProductNode, torch::autograd::deleteNode);
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

std::optional<Tensor> optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(object));
}

bool is_tensor(PyObject* object) { return THPVariable_CheckExact(object); }
bool is_tensor_or_none(PyObject* object) { return object == Py_None || is_tensor(object); }

PyObject* run_and_wrap(const Product& product) {
  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    out = run(product);
  }
  if (!out.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(out));
}

PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !is_tensor(args[0]) || !is_tensor(args[1]) || !is_tensor_or_none(args[2]) ||
      !is_tensor_or_none(args[3]) || !PyUnicode_Check(args[4]))
    Py_RETURN_NONE;
  const std::optional<Activation> activation = find_activation(PyUnicode_AsUTF8(args[4]));
  if (!activation) Py_RETURN_NONE;
  return run_and_wrap({&linear_function, THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), true,
                       optional_tensor(args[2]), optional_tensor(args[3]), *activation});
  END_HANDLE_TH_ERRORS
}

PyObject* matmul(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !is_tensor(args[0]) || !is_tensor(args[1])) Py_RETURN_NONE;
  return run_and_wrap({&matmul_function, THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), false, std::nullopt,
                       std::nullopt, Activation::none});
  END_HANDLE_TH_ERRORS
}

// bind(linear_backward, matmul_backward): the Python formulas.
PyObject* bind(PyObject*, PyObject* const* args, Py_ssize_t) {
  linear_function.backward = Py_NewRef(args[0]);
  matmul_function.backward = Py_NewRef(args[1]);
  Py_RETURN_NONE;
}

// allow(bool): whether a call may be plain at all. Returns what held before.
PyObject* allow(PyObject*, PyObject* wanted) { return PyBool_FromLong(allowed.exchange(wanted == Py_True)); }

template <typename F>
PyCFunction as_method(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"linear", as_method(linear), METH_FASTCALL, "linear(x, weight, bias, shadow, activation): None if not plain."},
    {"matmul", as_method(matmul), METH_FASTCALL, "matmul(a, b): None if not plain."},
    {"bind", as_method(bind), METH_FASTCALL, "bind(linear_backward, matmul_backward): the Python formulas."},
    {"allow", allow, METH_O, "allow(bool): whether a call may be plain at all; returns what held before."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module{PyModuleDef_HEAD_INIT, "_nodes", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ak

PyMODINIT_FUNC PyInit__nodes() { return PyModule_Create(&ak::module); }
