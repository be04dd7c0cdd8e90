// The names of activations in schemas, in Python and in messages.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "activation/formula.h"

namespace ak {

inline constexpr const char* kActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu", "swiglu"};

inline const char* name_of(Activation activation) { return kActivationNames[static_cast<int>(activation)]; }

inline std::optional<Activation> find_activation(std::string_view name) {
  for (int i = 0; i < kActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  return std::nullopt;
}

// The argument `activation` of an op.
inline Activation activation_named(const char* op, const std::string& name) {
  if (const auto activation = find_activation(name)) return *activation;
  throw std::runtime_error(op + (": activation is '" + name) +
                           "'; accepted: none, relu, gelu, gelu_tanh, silu, swiglu");
}

}  // namespace ak
