// layer_norm and rms_norm, perhaps with an addition in front. Specification: amp_kernels/ops/norm.py.
#include "norm/call.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <tuple>
#include <utility>

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

struct Norm {
  Tensor x, weight, bias, residual;  // all but x may be undefined
  int64_t covered;                   // dimensions of the normalized shape
  double eps;
  bool centred;
};

// Its outputs are the norm and, with a residual, the sum. Saves x or the sum, weight, bias and statistics of the rows.
struct NormNode : FormulaNode {
  int64_t covered;
  double eps;
  bool centred;
  ScalarType x_type;

  explicit NormNode(const Norm& n)
      : FormulaNode(norm_function, n.residual.defined()
                                       ? torch::autograd::collect_next_edges(n.x, n.weight, n.bias, n.residual)
                                       : torch::autograd::collect_next_edges(n.x, n.weight, n.bias)),
        covered(n.covered),
        eps(n.eps),
        centred(n.centred),
        x_type(n.x.scalar_type()) {}

  std::vector<c10::IValue> options() const override { return {covered, eps, centred, dtype_name(x_type)}; }

  bool takes(const variable_list& grads) const override {
    return grads[0].defined() &&
           std::all_of(grads.begin(), grads.end(), [](const Tensor& g) { return !g.defined() || is_narrow_on_cpu(g); });
  }

  variable_list plainly(const variable_list& grads, const variable_list& saved) override {
    RECORD_FUNCTION("amp_kernels::norm_backward", c10::ArrayRef<const c10::IValue>{});
    const bool has_residual = num_outputs() > 3;
    const Tensor &weight = saved[1], &bias = saved[2], &mean = saved[3], &rstd = saved[4];
    const auto grad = dense(grads[0]), x = dense(saved[0]), scale = dense(weight);
    const auto grad_sum = dense(has_residual ? grads[1] : Tensor());
    const bool needs_x = task_should_compute_output(0), needs_residual = has_residual && task_should_compute_output(3);
    const bool needs_weight = task_should_compute_output(1), needs_bias = task_should_compute_output(2);
    const int parameters = needs_bias ? 2 : needs_weight ? 1 : 0;
    const int64_t rows = rstd.numel(), columns = x->numel() / rows;
    const auto gradient = [](bool needed, const Tensor& of) {
      return needed ? empty_cpu(of.sizes(), of.scalar_type()) : Tensor();
    };
    const Tensor grad_in = empty_cpu(x->sizes(), x->scalar_type());
    const Tensor branch = needs_x && x_type != x->scalar_type() ? empty_cpu(x->sizes(), x_type) : Tensor();
    const Tensor grad_weight = gradient(needs_weight, weight), grad_bias = gradient(needs_bias, bias);
    const RowNumbers sums(/*kept=*/false, {parameters, columns});
    (void)norm_backward({.grad = grad->const_data_ptr(),
                         .x = x->const_data_ptr(),
                         .weight = address_of(*scale),
                         .grad_sum = address_of(*grad_sum),
                         .mean = static_cast<const float*>(address_of(mean)),
                         .rstd = static_cast<const float*>(rstd.const_data_ptr()),
                         .out = grad_in.mutable_data_ptr(),
                         .branch = branch.defined() ? branch.mutable_data_ptr() : nullptr,
                         .slots = nullptr,
                         .sums = sums.data(),
                         .grad_type = type_of(*grad),
                         .x_type = type_of(*x),
                         .weight_type = type_of(*scale),
                         .grad_sum_type = type_of(*grad_sum),
                         .branch_type = type_of(branch),
                         .rows = rows,
                         .columns = static_cast<int>(columns),
                         .parameters = parameters},
                        nullptr);
    round_to_gradient(sums.data(), grad_weight);
    round_to_gradient(sums.data() + columns, grad_bias);
    variable_list found{branch.defined() ? branch : needs_x ? grad_in : Tensor(), grad_weight, grad_bias};
    if (has_residual) found.push_back(needs_residual ? grad_in : Tensor());
    return found;
  }
};

bool fits(const Tensor& t, at::IntArrayRef shape) {
  return !t.defined() || (is_narrow_on_cpu(t) && t.sizes().equals(shape) && has_own_grad_dtype(t));
}

// True if the kernels take these, of which x is plain.
bool is_plain_norm(const Norm& n, at::IntArrayRef shape) {
  const at::IntArrayRef sizes = n.x.sizes();
  return n.covered > 0 && n.x.dim() >= n.covered && n.x.numel() > 0 &&
         sizes.slice(static_cast<size_t>(n.x.dim() - n.covered)).equals(shape) && fits(n.weight, shape) &&
         fits(n.bias, shape) && fits(n.residual, sizes) && c10::multiply_integers(shape) <= kMaxColumns;
}

// The norm and the sum, the latter undefined without a residual; both undefined where the call is not plain.
std::pair<Tensor, Tensor> run(const Norm& n, at::IntArrayRef shape) {
  if (!is_plain_norm(n, shape)) return {};
  const bool recorded = is_recorded(n.x, n.weight, n.bias, n.residual), has_residual = n.residual.defined();
  const int64_t columns = c10::multiply_integers(shape), rows = n.x.numel() / columns;
  const ScalarType own = (has_residual ? n.residual : n.x).scalar_type(), type = result_type(own);
  if (!is_narrow(type)) return {};
  const Tensor y = empty_cpu(n.x.sizes(), type), sum = has_residual ? empty_cpu(n.x.sizes(), own) : Tensor();
  const RowNumbers mean(recorded, {n.centred ? rows : 0}), rstd(recorded, {rows});
  {
    RECORD_FUNCTION("amp_kernels::norm_forward", c10::ArrayRef<const c10::IValue>{});
    const auto from = dense(n.x), scale = dense(n.weight), shift = dense(n.bias), stream = dense(n.residual);
    (void)norm_forward({.x = from->const_data_ptr(),
                        .residual = address_of(*stream),
                        .weight = address_of(*scale),
                        .bias = address_of(*shift),
                        .sum = has_residual ? sum.mutable_data_ptr() : nullptr,
                        .y = y.mutable_data_ptr(),
                        .mean = n.centred ? mean.data() : nullptr,
                        .rstd = rstd.data(),
                        .x_type = type_of(n.x),
                        .residual_type = type_of(*stream),
                        .weight_type = type_of(*scale),
                        .bias_type = type_of(*shift),
                        .y_type = dtype_of(type),
                        .rows = rows,
                        .columns = static_cast<int>(columns),
                        .eps = static_cast<float>(n.eps)},
                       nullptr);
  }
  if (!recorded) return {y, sum};
  const auto node = hold(new NormNode(n));
  torch::autograd::set_history(y, node);
  if (has_residual) torch::autograd::set_history(sum, node);
  node->save(has_residual ? sum : n.x, /*is_output=*/has_residual);
  for (const Tensor* saved : {&n.weight, &n.bias}) node->save(*saved);
  node->save(n.centred ? mean.tensor() : Tensor());
  node->save(rstd.tensor());
  return {y, sum};
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
  if (count != 7 || !is_tensor(args[0]) || !is_tensor_or_none(args[2]) || !is_tensor_or_none(args[3]) ||
      !PyFloat_Check(args[4]) || !is_tensor_or_none(args[6]))
    Py_RETURN_NONE;
  const Tensor& x = THPVariable_Unpack(args[0]);
  if (!is_plain_input(x)) Py_RETURN_NONE;
  const std::optional<at::DimVector> shape = sizes_of(args[1]);
  if (!shape) Py_RETURN_NONE;
  const auto tensor = [&](Py_ssize_t i) { return optional_tensor(args[i]).value_or(Tensor()); };
  const Norm n{x,
               tensor(2),
               tensor(3),
               tensor(6),
               static_cast<int64_t>(shape->size()),
               PyFloat_AsDouble(args[4]),
               args[5] == Py_True};
  Tensor sum;
  PyObject* const y = wrapped_or_none(
      [&] {
        Tensor found;
        std::tie(found, sum) = run(n, *shape);
        return found;
      },
      x.numel() <= kBriefly);
  return sum.defined() ? Py_BuildValue("(NN)", y, THPVariable_Wrap(std::move(sum))) : y;
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
