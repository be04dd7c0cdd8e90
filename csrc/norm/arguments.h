// Argument checks that the CPU and the GPU kernels of norm_forward and norm_backward share.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_norm_rows(const char* op, ArgName name, const Tensor& t) {
  check_dtype(op, name, t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(t.dim() == 2 && t.size(1) > 0, op, ": ", name, " must have shape (rows, columns), columns > 0; got ",
           Ints{t.sizes()});
}

inline void check_norm_like(const char* op, ArgName name, const Tensor& t, const Tensor& x) {
  check_dtype(op, name, t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(same_sizes(t, x), op, ": ", name, " must have the shape of x, ", Ints{x.sizes()}, "; got ", Ints{t.sizes()});
}

// One value per column: of `columns`, or nothing.
inline void check_norm_parameter(const char* op, ArgName name, const std::optional<Tensor>& t, int64_t columns) {
  if (!t) return;
  check_dtype(op, name, *t, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(t->dim() == 1 && t->size(0) == columns, op, ": ", name, " must have shape (", columns, "); got ",
           Ints{t->sizes()});
}

inline void check_norm_statistic(const char* op, ArgName name, const Tensor& t, int64_t rows) {
  check_dtype(op, name, t, {ScalarType::Float});
  AK_CHECK(t.dim() == 1 && t.size(0) == rows, op, ": ", name, " must have shape (", rows, "); got ", Ints{t.sizes()});
}

// Of dropout on the branch in front of the addition.
inline void check_norm_mask(const char* op, const std::optional<Tensor>& seed, double p) {
  AK_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must be from 0 to 1; got ", p);
  if (seed) check_one_element(op, {"seed"}, *seed, ScalarType::Long);
}

inline void check_norm_forward(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& residual, const std::optional<Tensor>& seed, double p,
                               ScalarType out_dtype) {
  constexpr const char* op = "norm_forward";
  check_norm_rows(op, {"x"}, x);
  check_norm_parameter(op, {"weight"}, weight, x.size(1));
  check_norm_parameter(op, {"bias"}, bias, x.size(1));
  if (residual) check_norm_like(op, {"residual"}, *residual, x);
  AK_CHECK(!seed || residual, op, ": seed needs a residual");
  check_norm_mask(op, seed, p);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
}

inline void check_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& rstd,
                                const std::optional<Tensor>& mean, const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& grad_sum, const std::optional<Tensor>& seed,
                                int64_t parameters, double p, std::optional<ScalarType> branch_dtype) {
  constexpr const char* op = "norm_backward";
  check_norm_rows(op, {"x"}, x);
  check_norm_like(op, {"grad"}, grad, x);
  if (grad_sum) check_norm_like(op, {"grad_sum"}, *grad_sum, x);
  check_norm_parameter(op, {"weight"}, weight, x.size(1));
  check_norm_statistic(op, {"rstd"}, rstd, x.size(0));
  if (mean) check_norm_statistic(op, {"mean"}, *mean, x.size(0));
  AK_CHECK(!seed || branch_dtype, op, ": seed needs a branch_dtype");
  check_norm_mask(op, seed, p);
  if (branch_dtype)
    check_dtype(op, {"branch_dtype"}, *branch_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  AK_CHECK(parameters >= 0 && parameters <= 2, op, ": parameters must be 0, 1 or 2; got ", parameters);
}

inline std::optional<Tensor> without_gaps(const std::optional<Tensor>& t) {
  return t ? std::optional(torch::stable::contiguous(*t)) : std::nullopt;
}

}  // namespace ak
