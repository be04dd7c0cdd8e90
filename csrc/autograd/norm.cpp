// layer_norm and rms_norm without an addition in front. Specification: amp_kernels/ops/norm.py.
#include "norm/call.h"

#include <ATen/record_function.h>

#include <algorithm>

#include "autograd/functions.h"
#include "autograd/node.h"
#include "cast/call.h"

namespace ak {
namespace {

// The sums of the kernel, in fp32, to the gradient of a parameter.
void round_to_gradient(const float* sums, const Tensor& gradient) {
  if (!gradient.defined()) return;
  if (gradient.scalar_type() == ScalarType::Float) {
    std::copy_n(sums, gradient.numel(), gradient.mutable_data_ptr<float>());
    return;
  }
  const CastRef to_gradient[] = {
      {gradient.mutable_data_ptr(), sums, gradient.numel(), type_of(gradient), DType::kFloat32}};
  (void)cast(to_gradient, std::nullopt, nullptr, nullptr);
}

// Saves input, weight, bias and statistics of the rows.
struct NormNode : FormulaNode {
  int64_t covered;  // dimensions of the normalized shape
  double eps;
  bool centred;

  NormNode(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t dimensions, double epsilon, bool is_layer)
      : FormulaNode(norm_function, torch::autograd::collect_next_edges(x, weight, bias)),
        covered(dimensions),
        eps(epsilon),
        centred(is_layer) {}

  std::vector<c10::IValue> options() const override { return {covered, eps, centred}; }

  variable_list plainly(const Tensor& grad_in, const variable_list& saved) override {
    RECORD_FUNCTION("amp_kernels::norm_backward", c10::ArrayRef<const c10::IValue>{});
    const Tensor &weight = saved[1], &bias = saved[2], &mean = saved[3], &rstd = saved[4];
    const auto grad = dense(grad_in), x = dense(saved[0]), scale = dense(weight);
    const bool needs_weight = task_should_compute_output(1), needs_bias = task_should_compute_output(2);
    const int parameters = needs_bias ? 2 : needs_weight ? 1 : 0;
    const int64_t rows = rstd.numel(), columns = x->numel() / rows;
    const Tensor grad_x = empty_cpu(x->sizes(), x->scalar_type());
    const auto gradient = [](bool needed, const Tensor& of) {
      return needed ? empty_cpu(of.sizes(), of.scalar_type()) : Tensor();
    };
    const Tensor grad_weight = gradient(needs_weight, weight), grad_bias = gradient(needs_bias, bias);
    const RowNumbers sums(/*kept=*/false, {parameters, columns});
    (void)norm_backward({.grad = grad->const_data_ptr(),
                         .x = x->const_data_ptr(),
                         .weight = address_of(*scale),
                         .grad_sum = nullptr,
                         .mean = static_cast<const float*>(address_of(mean)),
                         .rstd = static_cast<const float*>(rstd.const_data_ptr()),
                         .out = grad_x.mutable_data_ptr(),
                         .branch = nullptr,
                         .slots = nullptr,
                         .sums = sums.data(),
                         .grad_type = type_of(*grad),
                         .x_type = type_of(*x),
                         .weight_type = type_of(*scale),
                         .grad_sum_type = DType::kFloat32,
                         .branch_type = DType::kFloat32,
                         .rows = rows,
                         .columns = static_cast<int>(columns),
                         .parameters = parameters,
                         .mask = {}},
                        nullptr);
    round_to_gradient(sums.data(), grad_weight);
    round_to_gradient(sums.data() + columns, grad_bias);
    return {task_should_compute_output(0) ? grad_x : Tensor(), grad_weight, grad_bias};
  }
};

bool fits(const Tensor& parameter, at::IntArrayRef shape) {
  return !parameter.defined() ||
         (is_narrow_on_cpu(parameter) && parameter.sizes().equals(shape) && has_own_grad_dtype(parameter));
}

Tensor run(const Tensor& x, at::IntArrayRef shape, const Tensor& weight, const Tensor& bias, double eps, bool centred) {
  const int64_t covered = static_cast<int64_t>(shape.size());
  if (covered == 0 || x.dim() < covered || x.numel() == 0) return {};
  if (!x.sizes().slice(static_cast<size_t>(x.dim() - covered)).equals(shape)) return {};
  if (!fits(weight, shape) || !fits(bias, shape)) return {};
  const bool recorded = is_recorded(x, weight, bias);
  const int64_t columns = c10::multiply_integers(shape), rows = x.numel() / columns;
  const ScalarType type = result_type(x.scalar_type());
  if (!is_narrow(type) || columns > kMaxColumns) return {};
  const Tensor y = empty_cpu(x.sizes(), type);
  const RowNumbers mean(recorded, {centred ? rows : 0}), rstd(recorded, {rows});
  {
    RECORD_FUNCTION("amp_kernels::norm_forward", c10::ArrayRef<const c10::IValue>{});
    const auto from = dense(x), scale = dense(weight), shift = dense(bias);
    (void)norm_forward({.x = from->const_data_ptr(),
                        .residual = nullptr,
                        .weight = address_of(*scale),
                        .bias = address_of(*shift),
                        .sum = nullptr,
                        .y = y.mutable_data_ptr(),
                        .mean = centred ? mean.data() : nullptr,
                        .rstd = rstd.data(),
                        .x_type = type_of(x),
                        .residual_type = DType::kFloat32,
                        .weight_type = type_of(*scale),
                        .bias_type = type_of(*shift),
                        .y_type = dtype_of(type),
                        .rows = rows,
                        .columns = static_cast<int>(columns),
                        .eps = static_cast<float>(eps),
                        .mask = {}},
                       nullptr);
  }
  if (!recorded) return y;
  const auto node = hold(new NormNode(x, weight, bias, covered, eps, centred));
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
  const Tensor& x = THPVariable_Unpack(args[0]);
  if (!is_plain_input(x)) Py_RETURN_NONE;
  const std::optional<at::DimVector> shape = sizes_of(args[1]);
  if (!shape) Py_RETURN_NONE;
  return wrapped_or_none(
      [&, eps = PyFloat_AsDouble(args[4]), centred = args[5] == Py_True] {
        return run(x, *shape, optional_tensor(args[2]).value_or(Tensor()), optional_tensor(args[3]).value_or(Tensor()),
                   eps, centred);
      },
      x.numel() <= kBriefly);
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
