// softmax and log_softmax of the module _nodes, along the last dimension, without a mask. Specification:
// amp_kernels/ops/softmax.py.
#include <ATen/record_function.h>

#include "autograd/rows_node.h"
#include "softmax/cpu_call.h"

namespace ak {
namespace {

// Saves the result of softmax, or input and statistics of log-softmax.
struct SoftmaxNode : RowsNode {
  using RowsNode::RowsNode;
  ScalarType input_type = ScalarType::Float;

  variable_list plainly(const Tensor& grad_in, const variable_list& saved) override {
    RECORD_FUNCTION("amp_kernels::softmax_rows_backward", c10::ArrayRef<const c10::IValue>{});
    const auto grad = dense(grad_in), of = dense(saved[0]);
    const Tensor grad_x = empty_cpu(of->sizes(), input_type);
    const int64_t columns = of->size(-1);
    softmax_backward_call({.grad = grad->const_data_ptr(),
                           .grad_type = grad->scalar_type(),
                           .of = of->const_data_ptr(),
                           .of_type = of->scalar_type(),
                           .statistics = saved[1].defined() ? saved[1].const_data_ptr<float>() : nullptr,
                           .mask = {},
                           .rows = of->numel() / columns,
                           .columns = columns,
                           .grad_x = grad_x.mutable_data_ptr(),
                           .grad_x_type = input_type});
    return {grad_x};
  }
};

Tensor run(const Tensor& x, int64_t dim, bool log) {
  if (!nothing_between() || !is_narrow_on_cpu(x) || !has_own_grad_dtype(x)) return {};
  if (x.numel() == 0 || x.dim() == 0 || (dim != -1 && dim != x.dim() - 1)) return {};
  const bool recorded = is_recorded(x);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const ScalarType type = result_type(x.scalar_type());
  if (!is_narrow(type)) return {};
  const Tensor y = empty_cpu(x.sizes(), type);
  std::optional<RowNumbers> statistics;
  if (log) statistics.emplace(recorded, at::IntArrayRef{2, rows});
  {
    RECORD_FUNCTION("amp_kernels::softmax_rows", c10::ArrayRef<const c10::IValue>{});
    const auto from = dense(x);
    softmax_call({.x = from->const_data_ptr(),
                  .x_type = x.scalar_type(),
                  .mask = {},
                  .safe = false,
                  .rows = rows,
                  .columns = columns,
                  .y = y.mutable_data_ptr(),
                  .y_type = type,
                  .statistics = log ? statistics->data() : nullptr});
  }
  if (!recorded) return y;
  const auto node = hold(new SoftmaxNode(softmax_function, torch::autograd::collect_next_edges(x), {log}));
  node->input_type = x.scalar_type();
  torch::autograd::set_history(y, node);
  node->save(log ? x : y, /*is_output=*/!log);
  node->save(log ? statistics->tensor() : Tensor());
  return y;
}

}  // namespace

PyObject* softmax(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !is_tensor(args[0]) || !PyLong_CheckExact(args[1])) Py_RETURN_NONE;
  const Tensor& x = THPVariable_Unpack(args[0]);
  return wrapped_or_none([&, dim = PyLong_AsLongLong(args[1]), log = args[2] == Py_True] { return run(x, dim, log); },
                         x.numel() <= kBriefly);
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
