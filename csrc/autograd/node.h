// The autograd node of every function of the module _nodes.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "autograd/plain.h"

namespace ak {

using torch::autograd::variable_list;

// The owner of a new node, of the type that an edge has: std::shared_ptr up to torch 2.12, an intrusive pointer since.
template <typename T>
auto hold(T* node) {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(node, [](T* last) { deleteNode(last); });  // torch's deleter does not recurse
  else
    return c10::intrusive_ptr<T>::unsafe_steal_from_new(node);
}

// True if only the first gradient is there.
bool is_alone(const variable_list& grads);

// Computes gradients with the kernels if the backward is plain too. A recorded backward (create_graph=True), one under
// a mode and one in compiled autograd's graph run the function's Python formula on the saved tensors.
class FormulaNode : public torch::autograd::Node {
 public:
  FormulaNode(const Function& function, torch::autograd::edge_list&& inputs)
      : Node(std::move(inputs)), function_(&function) {}

  // Saves in the order in which the formula takes them. An undefined tensor becomes None.
  void save(const Tensor& t, bool is_output = false) { saved_.push_back({SavedVariable(t, is_output), is_output}); }

  std::string name() const override { return function_->name; }
  void release_variables() override;
  variable_list apply(variable_list&& grads) override;
  // Compiled autograd: what its trace depends on, and the call of the formula in its graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override;

 protected:
  // True if the kernels take these gradients of the outputs, some of which may be undefined. Here: of the first alone.
  virtual bool takes(const variable_list& grads) const { return is_alone(grads) && is_narrow_on_cpu(grads[0]); }
  // A gradient per input, unrecorded; none at all if the kernels do not serve this machine.
  virtual variable_list plainly(const variable_list& grads, const variable_list& saved) = 0;
  // The formula's arguments after gradients, saved tensors and needs_input_grad: bools, ints, floats, strings and
  // lists of them.
  virtual std::vector<c10::IValue> options() const = 0;

 private:
  struct Saved {
    SavedVariable variable;
    bool is_output;
  };

  std::vector<bool> needs() const;

  const Function* function_;
  c10::SmallVector<Saved, 5> saved_;
};

}  // namespace ak
