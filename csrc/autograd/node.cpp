#include "autograd/node.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <mutex>

namespace ak {
namespace {

py::object python_of(const c10::IValue& value) {
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isString()) return py::str(value.toStringRef());
  if (!value.isList()) return py::float_(value.toDouble());
  const auto list = value.toListRef();
  py::tuple items(list.size());
  for (size_t i = 0; i < list.size(); ++i) items[i] = python_of(list[i]);
  return items;
}

// None stands for an undefined tensor.
py::tuple python_of(const variable_list& tensors) {
  py::tuple all(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) all[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::none();
  return all;
}

// backward(grads, saved, needs_input_grad, *options) -> a gradient per input.
variable_list by_formula(const Function& function, const variable_list& grads, const variable_list& saved,
                         const std::vector<bool>& needs, const std::vector<c10::IValue>& options) {
  const py::gil_scoped_acquire gil;
  py::tuple rest(options.size());
  for (size_t i = 0; i < options.size(); ++i) rest[i] = python_of(options[i]);
  const py::tuple found =
      py::handle(function.backward)(python_of(grads), python_of(saved), py::tuple(py::cast(needs)), *rest);
  variable_list result(needs.size());
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i] && !found[i].is_none()) result[i] = found[i].cast<Tensor>();
  }
  return result;
}

// by_formula of the arguments that apply_with_saved packed: the function's index, needs, which saved tensors are
// defined, the number of options; then options and tensors.
variable_list traced(const variable_list& grads, const std::vector<c10::IValue>& args) {
  const auto options = args.begin() + 4, tensors = options + args[3].toInt();
  variable_list saved;
  auto next = tensors;
  for (bool defined : args[2].toBoolList()) saved.push_back(defined ? (next++)->toTensor() : Tensor());
  return by_formula(*functions[args[0].toInt()], grads, saved, args[1].toBoolList().vec(), {options, tensors});
}

}  // namespace

bool is_alone(const variable_list& grads) {
  const auto defined = [](const Tensor& grad) { return grad.defined(); };
  return defined(grads[0]) && std::none_of(grads.begin() + 1, grads.end(), defined);
}

void FormulaNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Saved& saved : saved_) saved.variable.reset_data();
}

std::vector<bool> FormulaNode::needs() const {
  std::vector<bool> inputs(num_outputs());
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = task_should_compute_output(i);
  return inputs;
}

variable_list FormulaNode::apply(variable_list&& grads) {
  variable_list saved;
  saved.reserve(saved_.size());
  {
    // Not held for longer: a formula may get here again, from a saved output.
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto self = getptr();
    for (const Saved& each : saved_) saved.push_back(each.variable.unpack(self));
  }
  if (std::none_of(grads.begin(), grads.end(), [](const Tensor& grad) { return grad.defined(); }))
    return variable_list(num_outputs());
  if (!torch::autograd::GradMode::is_enabled() && nothing_between() && takes(grads)) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      variable_list found = plainly(grads, saved);
      if (!found.empty()) return found;
    } catch (const std::exception&) {  // mostly out of memory, which the formula reports better
    }
  }
  return by_formula(*function_, grads, saved, needs(), options());
}

void FormulaNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  for (const Saved& saved : saved_) args.collect(saved.variable, saved.is_output);
  args.collect(std::string(function_->name));
  // As nested values: a number of its own would be an input of the graph, and the trace not be repeated for another.
  for (const c10::IValue& option : options()) args.collect(option, /*nested=*/true);
}

variable_list FormulaNode::apply_with_saved(const variable_list& grads,
                                            torch::dynamo::autograd::SwapSavedVariables& swapped) {
  for (Saved& saved : saved_) swapped.before(saved.variable);
  const auto index = std::find(std::begin(functions), std::end(functions), function_) - std::begin(functions);
  c10::List<bool> defined;
  variable_list values;
  for (const Saved& saved : saved_) {
    const Tensor value = saved.variable.unpack(getptr());
    defined.push_back(value.defined());
    if (value.defined()) values.push_back(value);
  }
  const std::vector<c10::IValue> numbers = options();
  std::vector<c10::IValue> args{static_cast<int64_t>(index), needs(), defined, static_cast<int64_t>(numbers.size())};
  args.insert(args.end(), numbers.begin(), numbers.end());
  args.insert(args.end(), values.begin(), values.end());

  std::vector<at::TypePtr> schema;
  for (const c10::IValue& arg : args) schema.push_back(arg.isTensor() ? at::TensorType::get() : arg.type());
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::string call = compiler->bind_function(swapped.get_py_compiler(), name(), traced, schema,
                                                   /*is_custom_function=*/true, /*is_traceable=*/false);
  const auto metadata =
      torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          torch::dynamo::autograd::get_input_metadata(next_edges()));
  variable_list found =
      compiler->call_function(swapped.get_py_compiler(), "apply_functional", call, grads, args, metadata);
  for (Saved& saved : saved_) swapped.after(saved.variable);
  return found;
}

}  // namespace ak
