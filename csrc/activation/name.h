// The activation that a schema's string argument names.
#pragma once

#include <string>

#include "activation/formula.h"
#include "base/check.h"

namespace ak {

inline Activation activation_named(const char* op, const std::string& name) {
  if (const auto activation = find_activation(name)) return *activation;
  fail(op, ": activation is '", name, "'; accepted: none, relu, gelu, gelu_tanh, silu, swiglu");
}

}  // namespace ak
