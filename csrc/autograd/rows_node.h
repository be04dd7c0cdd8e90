// The node of a function of rows: norm, softmax, cross-entropy (nodes_norm.cpp, nodes_softmax.cpp, nodes_loss.cpp).
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "autograd/plain.h"

namespace ak {

using torch::autograd::variable_list;

// The owner of a new node: a std::shared_ptr up to torch 2.12, an intrusive pointer from 2.13 on, as an edge has it.
template <typename T>
auto hold(T* node) {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(node, [](T* last) { deleteNode(last); });  // torch's, which does not recurse
  else
    return c10::intrusive_ptr<T>::unsafe_steal_from_new(node);
}

// In the graph that compiled autograd traces a call of `formula(grads, args)`, in place of a node's backward.
variable_list call_in_graph(const torch::autograd::Node& node, torch::dynamo::autograd::functional_apply_t formula,
                            const variable_list& grads, const std::vector<c10::IValue>& args,
                            torch::dynamo::autograd::SwapSavedVariables& swapped);

struct RowsNode : torch::autograd::Node {
  // `options`, numbers, are what the Python backward gets behind gradients, saved tensors and needs_input_grad.
  RowsNode(const Function& function, torch::autograd::edge_list&& inputs, std::vector<c10::IValue> options)
      : Node(std::move(inputs)), function_(&function), options_(std::move(options)) {
    saved_.reserve(kMostSaved);
  }

  // In the order of the Python backward; an undefined tensor is None.
  void save(const Tensor& t, bool is_output = false) { saved_.push_back({SavedVariable(t, is_output), is_output}); }

  std::string name() const override { return function_->name; }
  void release_variables() override;
  variable_list apply(variable_list&& grads) override;
  // Compiled autograd traces a backward once: what it depends on, and a call in its graph, which runs the formula.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override;

 protected:
  // The gradients by the kernels, where nothing lies between: grad is plain and none is to be recorded.
  virtual variable_list plainly(const Tensor& grad, const variable_list& saved) = 0;

 private:
  static constexpr size_t kMostSaved = 5;  // by any of the functions

  struct Saved {
    SavedVariable variable;
    bool is_output;
  };

  std::vector<bool> needs() const;

  const Function* function_;
  std::vector<c10::IValue> options_;
  std::vector<Saved> saved_;
};

// Whether autograd records a function of these.
template <typename... Tensors>
bool is_recorded(const Tensors&... inputs) {
  return torch::autograd::GradMode::is_enabled() && ((inputs.defined() && inputs.requires_grad()) || ...);
}

// A plain tensor of fp16, bf16 or fp32 on the CPU.
inline bool is_narrow_on_cpu(const Tensor& t) { return t.is_cpu() && is_plain(t) && is_narrow(t.scalar_type()); }

// `t` itself where it is contiguous, else a copy that is, which nothing records or casts.
c10::MaybeOwned<Tensor> dense(const Tensor& t);

// Numbers of rows that a kernel leaves for its backward: a tensor where there will be one, else memory of this call.
// They come behind the result: with nothing behind it, malloc would give a large one back to the system, page by page.
class RowNumbers {
 public:
  RowNumbers(bool kept, at::IntArrayRef sizes) {
    if (kept) {
      tensor_ = empty_cpu(sizes, ScalarType::Float);
    } else {
      own_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(c10::multiply_integers(sizes)));
    }
  }
  float* data() const { return own_ ? own_.get() : static_cast<float*>(tensor_.mutable_data_ptr()); }
  const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;
  std::unique_ptr<float[]> own_;
};

// The dtype of a result: autocast's where that is on, else `own`.
ScalarType result_type(ScalarType own);

// Functions of the module; None where the call is not plain.
PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* softmax(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* cross_entropy(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* cast_lists(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace ak
