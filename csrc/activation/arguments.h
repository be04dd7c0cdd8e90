// The activation that a schema's string argument names, and the shape that it makes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "activation/formula.h"
#include "base/check.h"

namespace ak {

inline Activation activation_named(const char* op, const std::string& name) {
  if (const auto activation = find_activation(name)) return *activation;
  fail(op, ": activation is '", name, "'; accepted: none, relu, gelu, gelu_tanh, silu, swiglu");
}

// The dtype of `preact` is accepted; the shape of activation(preact).
inline std::vector<int64_t> activated_sizes(const char* op, Activation activation, const Tensor& preact) {
  check_dtype(op, {"preact"}, preact, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  std::vector<int64_t> sizes(preact.sizes().begin(), preact.sizes().end());
  if (is_gated(activation)) {
    AK_CHECK(!sizes.empty() && sizes.back() % 2 == 0, op, ": preact must have an even number of columns with '",
             kActivationNames[static_cast<int>(activation)], "'; got ", Ints{preact.sizes()});
    sizes.back() /= 2;
  }
  return sizes;
}

// What activation_backward takes.
inline void check_activation_gradient(const char* op, Activation activation, const Tensor& grad, const Tensor& preact) {
  const std::vector<int64_t> sizes = activated_sizes(op, activation, preact);
  check_dtype(op, {"grad"}, grad, {preact.scalar_type(), ScalarType::Float});
  AK_CHECK(grad.sizes().size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), grad.sizes().begin()), op,
           ": grad must have the shape of ", kActivationNames[static_cast<int>(activation)], "(preact), ", Ints{sizes},
           "; got ", Ints{grad.sizes()});
}

}  // namespace ak
