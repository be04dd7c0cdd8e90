#include "autograd/rows_node.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <mutex>

namespace ak {
namespace {

py::object python_of(const c10::IValue& number) {
  if (number.isBool()) return py::bool_(number.toBool());
  if (number.isInt()) return py::int_(number.toInt());
  return py::float_(number.toDouble());
}

// backward(grads, saved, needs_input_grad, *options) -> a gradient per input.
variable_list by_formula(const Function& function, const variable_list& grads, const variable_list& saved,
                         const std::vector<bool>& needs, const std::vector<c10::IValue>& options) {
  const py::gil_scoped_acquire gil;
  py::tuple numbers(options.size());
  for (size_t i = 0; i < options.size(); ++i) numbers[i] = python_of(options[i]);
  const py::tuple found =
      py::handle(function.backward)(objects_of(grads), objects_of(saved), py::tuple(py::cast(needs)), *numbers);
  variable_list result(needs.size());
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i] && !found[i].is_none()) result[i] = found[i].cast<Tensor>();
  }
  return result;
}

// by_formula of what apply_with_saved packed: function, needs, which tensors are defined, how many options; options,
// tensors.
variable_list traced(const variable_list& grads, const std::vector<c10::IValue>& args) {
  const auto options = args.begin() + 4, tensors = options + args[3].toInt();
  variable_list saved;
  auto next = tensors;
  for (bool defined : args[2].toBoolList()) saved.push_back(defined ? (next++)->toTensor() : Tensor());
  return by_formula(*functions[args[0].toInt()], grads, saved, args[1].toBoolList().vec(), {options, tensors});
}

}  // namespace

ScalarType result_type(ScalarType own) {
  return at::autocast::is_autocast_enabled(at::kCPU) ? at::autocast::get_autocast_dtype(at::kCPU) : own;
}

c10::MaybeOwned<Tensor> dense(const Tensor& t) {
  if (!t.defined() || t.is_contiguous()) return c10::MaybeOwned<Tensor>::borrowed(t);
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return c10::MaybeOwned<Tensor>::owned(t.contiguous());
}

variable_list call_in_graph(const torch::autograd::Node& node, torch::dynamo::autograd::functional_apply_t formula,
                            const variable_list& grads, const std::vector<c10::IValue>& args,
                            torch::dynamo::autograd::SwapSavedVariables& swapped) {
  std::vector<at::TypePtr> schema;
  for (const c10::IValue& arg : args) schema.push_back(arg.isTensor() ? at::TensorType::get() : arg.type());
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  const std::string call = compiler->bind_function(swapped.get_py_compiler(), node.name(), std::move(formula), schema,
                                                   /*is_custom_function=*/true, /*is_traceable=*/false);
  const auto metadata =
      torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          torch::dynamo::autograd::get_input_metadata(node.next_edges()));
  return compiler->call_function(swapped.get_py_compiler(), "apply_functional", call, grads, args, metadata);
}

void RowsNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Saved& saved : saved_) saved.variable.reset_data();
}

std::vector<bool> RowsNode::needs() const {
  std::vector<bool> inputs(num_outputs());
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = task_should_compute_output(i);
  return inputs;
}

variable_list RowsNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  variable_list saved;
  saved.reserve(saved_.size());
  const auto self = getptr();
  for (const Saved& each : saved_) saved.push_back(each.variable.unpack(self));
  if (!grads[0].defined()) return variable_list(num_outputs());
  if (!torch::autograd::GradMode::is_enabled() && nothing_between() && is_narrow_on_cpu(grads[0])) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return plainly(grads[0], saved);
    } catch (const std::exception&) {  // there is no memory, as a rule: the formula has the words for it
    }
  }
  return by_formula(*function_, grads, saved, needs(), options_);
}

void RowsNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  for (const Saved& saved : saved_) args.collect(saved.variable, saved.is_output);
  args.collect(std::string(function_->name));
  for (const c10::IValue& option : options_) args.collect(option);
}

variable_list RowsNode::apply_with_saved(const variable_list& grads,
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
  std::vector<c10::IValue> args{static_cast<int64_t>(index), needs(), defined, static_cast<int64_t>(options_.size())};
  args.insert(args.end(), options_.begin(), options_.end());
  args.insert(args.end(), values.begin(), values.end());
  variable_list found = call_in_graph(*this, traced, grads, args, swapped);
  for (Saved& saved : saved_) swapped.after(saved.variable);
  return found;
}

}  // namespace ak
