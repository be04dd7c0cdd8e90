// Argument checks that the CPU and the GPU kernels of dropout share.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_dropout(const Tensor& x, const Tensor& seed, const std::optional<Tensor>& residual, double p,
                          ScalarType out_dtype) {
  constexpr const char* op = "dropout";
  const auto accepted = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
  check_dtype(op, {"x"}, x, accepted);
  AK_CHECK(p >= 0.0 && p <= 1.0, op, ": p must be from 0 to 1; got ", p);
  check_one_element(op, {"seed"}, seed, ScalarType::Long);
  if (residual) {
    check_dtype(op, {"residual"}, *residual, accepted);
    AK_CHECK(same_sizes(*residual, x), op, ": residual must have the shape of x, ", Ints{x.sizes()}, "; got ",
             Ints{residual->sizes()});
  }
  check_dtype(op, {"out_dtype"}, out_dtype, accepted);
}

}  // namespace ak
