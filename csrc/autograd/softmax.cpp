// softmax and log_softmax along the last dimension, without a mask. Specification: amp_kernels/ops/softmax.py.
#include "softmax/call.h"

#include <ATen/record_function.h>

#include "autograd/functions.h"
#include "autograd/node.h"

namespace ak {
namespace {

// Saves the result of softmax, or input and statistics of log-softmax.
struct SoftmaxNode : FormulaNode {
  ScalarType input_type;
  bool log;

  SoftmaxNode(const Tensor& x, bool is_log)
      : FormulaNode(softmax_function, torch::autograd::collect_next_edges(x)),
        input_type(x.scalar_type()),
        log(is_log) {}

  std::vector<c10::IValue> options() const override { return {log}; }

  variable_list plainly(const variable_list& grads, const variable_list& saved) override {
    RECORD_FUNCTION("amp_kernels::softmax_rows_backward", c10::ArrayRef<const c10::IValue>{});
    const auto grad = dense(grads[0]), of = dense(saved[0]);
    const Tensor grad_x = empty_cpu(of->sizes(), input_type);
    const int64_t columns = of->size(-1);
    (void)softmax_rows_backward({.grad = grad->const_data_ptr(),
                                 .of = of->const_data_ptr(),
                                 .statistics = static_cast<const float*>(address_of(saved[1])),
                                 .mask = {},
                                 .out = grad_x.mutable_data_ptr(),
                                 .grad_type = type_of(*grad),
                                 .of_type = type_of(*of),
                                 .out_type = dtype_of(input_type),
                                 .rows = of->numel() / columns,
                                 .columns = static_cast<int>(columns)},
                                nullptr);
    return {grad_x};
  }
};

Tensor run(const Tensor& x, int64_t dim, bool log) {
  if (x.numel() == 0 || x.dim() == 0 || (dim != -1 && dim != x.dim() - 1)) return {};
  const bool recorded = is_recorded(x);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const ScalarType type = result_type(x.scalar_type());
  if (!is_narrow(type) || columns > kMaxSoftmaxColumns) return {};
  const Tensor y = empty_cpu(x.sizes(), type);
  std::optional<RowNumbers> statistics;
  if (log) statistics.emplace(recorded, at::IntArrayRef{2, rows});
  {
    RECORD_FUNCTION("amp_kernels::softmax_rows", c10::ArrayRef<const c10::IValue>{});
    const auto from = dense(x);
    (void)softmax_rows({.x = from->const_data_ptr(),
                        .y = y.mutable_data_ptr(),
                        .statistics = log ? statistics->data() : nullptr,
                        .mask = {},
                        .x_type = type_of(x),
                        .y_type = dtype_of(type),
                        .rows = rows,
                        .columns = static_cast<int>(columns),
                        .safe = false},
                       nullptr);
  }
  if (!recorded) return y;
  const auto node = hold(new SoftmaxNode(x, log));
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
  if (!is_plain_input(x)) Py_RETURN_NONE;
  return wrapped_or_none([&, dim = PyLong_AsLongLong(args[1]), log = args[2] == Py_True] { return run(x, dim, log); },
                         x.numel() <= kBriefly);
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
