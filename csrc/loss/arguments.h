// The arguments of cross_entropy_rows_, checked, as the kernels of every device take them.
#pragma once

#include <optional>

#include "base/check.h"
#include "loss/formula.h"

namespace ak {

struct CrossEntropyShape {
  int64_t rows, classes;
  int64_t logits_stride, target_stride, grad_stride;  // elements from row to row
  bool soft;                                          // the target holds probabilities
};

inline bool has_adjacent_columns(const Tensor& t) { return t.numel() == 0 || t.size(1) == 1 || t.stride(1) == 1; }

inline CrossEntropyShape check_cross_entropy(const char* op, const Tensor& logits, const Tensor& target,
                                             const std::optional<Tensor>& weight, const std::optional<Tensor>& factor,
                                             const Tensor& loss, const std::optional<Tensor>& grad) {
  const auto floats = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
  check_dtype(op, {"logits"}, logits, floats);
  AK_CHECK(logits.dim() == 2 && logits.size(1) > 0 && has_adjacent_columns(logits), op,
           ": logits must be [rows, classes] with adjacent classes, at least one; got shape ", Ints{logits.sizes()},
           " with strides ", Ints{logits.strides()});
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const bool soft = target.scalar_type() != ScalarType::Long;
  if (soft) {
    check_dtype(op, {"target"}, target, {ScalarType::Long, ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
    AK_CHECK(same_sizes(target, logits) && has_adjacent_columns(target), op,
             ": target, of probabilities, must have the shape ", Ints{logits.sizes()}, " and adjacent classes; got ",
             Ints{target.sizes()}, " with strides ", Ints{target.strides()});
  } else {
    AK_CHECK(target.dim() == 1 && target.size(0) == rows, op, ": target must have one class a row, (", rows, "); got ",
             Ints{target.sizes()});
  }
  const auto vector = [&](ArgName name, const Tensor& t, int64_t size) {
    check_dtype(op, name, t, {ScalarType::Float});
    AK_CHECK(t.dim() == 1 && t.size(0) == size, op, ": ", name, " must have shape (", size, "); got ", Ints{t.sizes()});
  };
  if (weight) {
    vector({"weight"}, *weight, classes);
    AK_CHECK(weight->is_contiguous(), op, ": weight must be contiguous");
  }
  vector({"loss"}, loss, rows);
  AK_CHECK(loss.is_contiguous(), op, ": loss must be contiguous");
  AK_CHECK(factor.has_value() == grad.has_value(), op, ": factor and grad must be given together, or neither");
  if (grad) {
    vector({"factor"}, *factor, rows);
    check_dtype(op, {"grad"}, *grad, {logits.scalar_type()});
    AK_CHECK(same_sizes(*grad, logits) && has_adjacent_columns(*grad) && (rows < 2 || grad->stride(0) >= classes), op,
             ": grad must have the shape of logits, ", Ints{logits.sizes()}, ", and adjacent classes; got ",
             Ints{grad->sizes()}, " with strides ", Ints{grad->strides()});
  }
  return {rows, classes, logits.stride(0), target.stride(0), grad ? grad->stride(0) : 0, soft};
}

inline CrossEntropyTerms cross_entropy_terms(double label_smoothing, double z_loss, int64_t classes) {
  return {static_cast<float>(1.0 - label_smoothing), static_cast<float>(label_smoothing / static_cast<double>(classes)),
          static_cast<float>(z_loss)};
}

}  // namespace ak
