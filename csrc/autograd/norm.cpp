// layer_norm and rms_norm of the module _nodes, without an addition in front. Specification: amp_kernels/ops/norm.py.
#include <ATen/record_function.h>

#include "autograd/rows_node.h"
#include "norm/cpu_call.h"

namespace ak {
namespace {

NormParameter parameter_of(const Tensor& t) {
  return t.defined() ? NormParameter{t.const_data_ptr(), t.scalar_type()} : NormParameter{};
}

NormSums sums_for(const Tensor& t) {
  return t.defined() ? NormSums{t.mutable_data_ptr(), t.scalar_type()} : NormSums{};
}

float* floats(const Tensor& t) { return t.defined() ? static_cast<float*>(t.mutable_data_ptr()) : nullptr; }

struct NormNode : RowsNode {
  using RowsNode::RowsNode;

  variable_list plainly(const Tensor& grad_in, const variable_list& saved) override {
    RECORD_FUNCTION("amp_kernels::norm_backward", c10::ArrayRef<const c10::IValue>{});
    const Tensor &weight = saved[1], &bias = saved[2], &mean = saved[3], &rstd = saved[4];
    const auto grad = dense(grad_in), x = dense(saved[0]), scale = dense(weight);
    const bool needs_weight = task_should_compute_output(1), needs_bias = task_should_compute_output(2);
    const int64_t rows = rstd.numel(), columns = x->numel() / rows, parameters = needs_bias ? 2 : needs_weight ? 1 : 0;
    const Tensor grad_x = empty_cpu(x->sizes(), x->scalar_type());
    const auto gradient = [](bool needed, const Tensor& of) {
      return needed ? empty_cpu(of.sizes(), of.scalar_type()) : Tensor();
    };
    const Tensor grad_weight = gradient(needs_weight, weight), grad_bias = gradient(needs_bias, bias);
    norm_backward_call({.grad = grad->const_data_ptr(),
                        .grad_type = grad->scalar_type(),
                        .x = x->const_data_ptr(),
                        .x_type = x->scalar_type(),
                        .mean = floats(mean),
                        .rstd = floats(rstd),
                        .weight = parameter_of(*scale),
                        .grad_sum = nullptr,
                        .grad_sum_type = ScalarType::Float,
                        .rows = rows,
                        .columns = columns,
                        .grad_x = grad_x.mutable_data_ptr(),
                        .parameters = parameters,
                        .of_parameters = {sums_for(grad_weight), sums_for(grad_bias)}});
    return {task_should_compute_output(0) ? grad_x : Tensor(), grad_weight, grad_bias};
  }
};

bool fits(const Tensor& parameter, at::IntArrayRef shape) {
  return !parameter.defined() ||
         (is_narrow_on_cpu(parameter) && parameter.sizes().equals(shape) && has_own_grad_dtype(parameter));
}

Tensor run(const Tensor& x, at::IntArrayRef shape, const Tensor& weight, const Tensor& bias, double eps, bool centred) {
  const int64_t covered = static_cast<int64_t>(shape.size());
  if (!nothing_between() || !is_narrow_on_cpu(x) || !has_own_grad_dtype(x)) return {};
  if (covered == 0 || x.dim() < covered || x.numel() == 0) return {};
  if (!x.sizes().slice(static_cast<size_t>(x.dim() - covered)).equals(shape)) return {};
  if (!fits(weight, shape) || !fits(bias, shape)) return {};
  const bool recorded = is_recorded(x, weight, bias);
  const int64_t columns = c10::multiply_integers(shape), rows = x.numel() / columns;
  const ScalarType type = result_type(x.scalar_type());
  if (!is_narrow(type)) return {};
  const Tensor y = empty_cpu(x.sizes(), type);
  const RowNumbers mean(recorded, {centred ? rows : 0}), rstd(recorded, {rows});
  {
    RECORD_FUNCTION("amp_kernels::norm_forward", c10::ArrayRef<const c10::IValue>{});
    const auto from = dense(x), scale = dense(weight), shift = dense(bias);
    norm_forward_call({.x = from->const_data_ptr(),
                       .x_type = x.scalar_type(),
                       .weight = parameter_of(*scale),
                       .bias = parameter_of(*shift),
                       .residual = nullptr,
                       .sum_type = x.scalar_type(),
                       .eps = static_cast<float>(eps),
                       .rows = rows,
                       .columns = columns,
                       .y = y.mutable_data_ptr(),
                       .y_type = type,
                       .sum = nullptr,
                       .mean = centred ? mean.data() : nullptr,
                       .rstd = rstd.data()});
  }
  if (!recorded) return y;
  const auto node =
      hold(new NormNode(norm_function, torch::autograd::collect_next_edges(x, weight, bias), {covered, eps, centred}));
  for (const Tensor* saved : {&x, &weight, &bias}) node->save(*saved);
  node->save(centred ? mean.tensor() : Tensor());
  node->save(rstd.tensor());
  torch::autograd::set_history(y, node);
  return y;
}

// An int, or a tuple or list of ints.
std::optional<at::DimVector> sizes_of(PyObject* object) {
  at::DimVector sizes;
  if (PyLong_CheckExact(object)) {
    sizes.push_back(PyLong_AsLongLong(object));
  } else if (PyTuple_Check(object) || PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      PyObject* const size = PySequence_Fast_GET_ITEM(object, i);
      if (!PyLong_CheckExact(size)) return std::nullopt;
      sizes.push_back(PyLong_AsLongLong(size));
    }
  } else {
    return std::nullopt;
  }
  return sizes;
}

}  // namespace

PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6 || !is_tensor(args[0]) || !is_tensor_or_none(args[2]) || !is_tensor_or_none(args[3]) ||
      !PyFloat_Check(args[4]))
    Py_RETURN_NONE;
  const std::optional<at::DimVector> shape = sizes_of(args[1]);
  if (!shape) Py_RETURN_NONE;
  const Tensor& x = THPVariable_Unpack(args[0]);
  return wrapped_or_none(
      [&, eps = PyFloat_AsDouble(args[4]), centred = args[5] == Py_True] {
        return run(x, *shape, optional_tensor(args[2]).value_or(Tensor()), optional_tensor(args[3]).value_or(Tensor()),
                   eps, centred);
      },
      x.numel() <= kBriefly);
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
