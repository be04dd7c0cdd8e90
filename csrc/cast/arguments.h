// The checks of cast_ that keep each access inside its tensor, for every device.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_casts(const char* op, const TensorList& destinations, const TensorList& sources) {
  AK_CHECK(destinations.size() == sources.size(), op, ": there are ", destinations.size(), " destinations and ",
           sources.size(), " sources");
  for (size_t i = 0; i < destinations.size(); ++i) {
    const ArgName to{"destinations", static_cast<int64_t>(i)}, from{"sources", static_cast<int64_t>(i)};
    const Tensor &destination = destinations[i], &source = sources[i];
    for (const auto& [name, tensor] : {std::pair(to, &destination), std::pair(from, &source)}) {
      check_dtype(op, name, *tensor, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
      check_dense(op, name, *tensor);
    }
    AK_CHECK(same_layout(destination, source), op, ": ", to, " has shape ", Ints{destination.sizes()}, " and strides ",
             Ints{destination.strides()}, ", ", from, " has shape ", Ints{source.sizes()}, " and strides ",
             Ints{source.strides()}, "; they must be the same");
  }
}

}  // namespace ak
