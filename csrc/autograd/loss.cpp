// cross_entropy of rows of logits and classes without weights, as a mean or a sum. Specification:
// amp_kernels/ops/cross_entropy.py.
#include "loss/call.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/functions.h"
#include "autograd/node.h"

namespace ak {
namespace {

struct Loss {
  int64_t ignore_index;
  bool is_mean;
  double label_smoothing, z_loss;

  // The losses of the rows and, if `grad` is defined, the gradient of each times `factor`.
  Tensor rows(const Tensor& logits, const Tensor& target, const Tensor& grad, float factor) const {
    RECORD_FUNCTION("amp_kernels::cross_entropy_rows_", c10::ArrayRef<const c10::IValue>{});
    const Tensor losses = empty_cpu({logits.size(0)}, ScalarType::Float);
    const int64_t classes = logits.size(1);
    (void)cross_entropy_rows({.logits = logits.const_data_ptr(),
                              .target = target.const_data_ptr(),
                              .weight = nullptr,
                              .factor = &factor,
                              .loss = losses.mutable_data_ptr<float>(),
                              .grad = grad.defined() ? grad.mutable_data_ptr() : nullptr,
                              .rows = logits.size(0),
                              .classes = static_cast<int>(classes),
                              .logits_stride = logits.stride(0),
                              .target_stride = target.stride(0),
                              .factor_stride = 0,
                              .grad_stride = classes,
                              .ignore_index = ignore_index,
                              .terms = cross_entropy_terms(label_smoothing, z_loss, classes),
                              .type = type_of(logits),
                              .target_type = DType::kFloat32,
                              .soft = false,
                              .grad_type = type_of(logits)},
                             nullptr);
    return losses;
  }

  // The number of rows that are not ignored; none if a class is out of range or fp32 cannot hold the number.
  std::optional<float> counted(const Tensor& target, int64_t classes) const {
    const int64_t *const values = target.const_data_ptr<int64_t>(), rows = target.size(0), stride = target.stride(0);
    int64_t count = 0;
    bool in_range = true;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t value = values[row * stride];
      const bool counts = value != ignore_index;
      count += counts;
      in_range &= !counts | (static_cast<uint64_t>(value) < static_cast<uint64_t>(classes));
    }
    if (!in_range) return std::nullopt;
    return count <= (1 << 24) ? std::optional(static_cast<float>(count)) : std::nullopt;
  }

  // The gradient of a row's loss, given that of the loss.
  float share(float grad, float count) const { return is_mean ? grad / count : grad; }
};

// Saves fp16 logits and the target, or the gradient of other logits for a gradient of the loss of 1.
struct LossNode : FormulaNode {
  Loss loss;

  LossNode(const Tensor& logits, const Loss& of)
      : FormulaNode(cross_entropy_function, torch::autograd::collect_next_edges(logits)), loss(of) {}

  std::vector<c10::IValue> options() const override {
    return {loss.ignore_index, loss.is_mean, loss.label_smoothing, loss.z_loss};
  }

  variable_list plainly(const variable_list& grads, const variable_list& saved) override {
    const float factor = grads[0].item<float>();
    const Tensor &of = saved[0], &target = saved[1];
    if (target.defined()) {
      const Tensor grad = empty_cpu(of.sizes(), of.scalar_type());
      loss.rows(of, target, grad, loss.share(factor, loss.counted(target, of.size(1)).value()));
      return {grad};
    }
    const bool again = torch::autograd::get_current_graph_task_keep_graph();
    if (factor == 1.0f && !again) return {of};
    Tensor grad = again ? empty_cpu(of.sizes(), of.scalar_type()) : of;
    const Tensor factors = empty_cpu({1, 1}, ScalarType::Float);  // of no dimension it would be rounded to 16 bits
    *factors.mutable_data_ptr<float>() = factor;
    return {at::mul_out(grad, of, factors)};
  }
};

// The fp32 scalar in another dtype. The dispatcher would take longer than the loss of a few rows.
Tensor as(ScalarType type, Tensor scalar) {
  if (type == ScalarType::Float) return scalar;
  const Tensor narrow = empty_cpu({}, type);
  const float value = *scalar.const_data_ptr<float>();
  if (type == ScalarType::Half) {
    *narrow.mutable_data_ptr<at::Half>() = value;
  } else {
    *narrow.mutable_data_ptr<at::BFloat16>() = value;
  }
  return narrow;
}

bool has_adjacent_classes(const Tensor& logits) { return logits.size(1) == 1 || logits.stride(1) == 1; }

Tensor run(const Tensor& logits, const Tensor& target, const Loss& loss) {
  const ScalarType own = logits.scalar_type();
  if (logits.dim() != 2 || logits.numel() == 0 || logits.size(1) > kMaxClasses || !has_adjacent_classes(logits))
    return {};
  if (!target.is_cpu() || !is_plain(target) || target.scalar_type() != ScalarType::Long || target.dim() != 1 ||
      target.size(0) != logits.size(0))
    return {};
  if (!(loss.label_smoothing >= 0.0 && loss.label_smoothing <= 1.0) || !(loss.z_loss >= 0.0)) return {};
  const std::optional<float> count = loss.counted(target, logits.size(1));
  if (!count) return {};
  const bool recorded = is_recorded(logits), now = own != ScalarType::Half;
  Tensor result, grad;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (recorded && now) grad = empty_cpu(logits.sizes(), own);
    result = at::sum(loss.rows(logits, target, grad, loss.share(1.0f, *count)));
    float& total = *result.mutable_data_ptr<float>();
    total = loss.share(total, *count);
    if (!autocast) result = as(own, std::move(result));
  }
  if (!recorded) return result;
  const auto node = hold(new LossNode(logits, loss));
  node->save(now ? grad : logits);
  node->save(now ? Tensor() : target);
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace

PyObject* cross_entropy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6 || !is_tensor(args[0]) || !is_tensor(args[1]) || !PyLong_CheckExact(args[2]) ||
      !PyUnicode_Check(args[3]) || !PyFloat_Check(args[4]) || !PyFloat_Check(args[5]))
    Py_RETURN_NONE;
  const Tensor &logits = THPVariable_Unpack(args[0]), &target = THPVariable_Unpack(args[1]);
  if (!is_plain_input(logits)) Py_RETURN_NONE;
  const bool is_mean = PyUnicode_CompareWithASCIIString(args[3], "mean") == 0;
  if (!is_mean && PyUnicode_CompareWithASCIIString(args[3], "sum") != 0) Py_RETURN_NONE;
  const Loss loss{PyLong_AsLongLong(args[2]), is_mean, PyFloat_AsDouble(args[4]), PyFloat_AsDouble(args[5])};
  return wrapped_or_none([&] { return run(logits, target, loss); }, logits.numel() <= kBriefly);
  END_HANDLE_TH_ERRORS
}

}  // namespace ak
