// Checks of CPU kernels' arguments, which must be in host memory.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_cpu(const char* op, ArgName name, const Tensor& t) {
  AK_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU like the other arguments");
}

template <typename T>
T read_scalar(const char* op, ArgName name, const Tensor& t) {
  check_one_element(op, name, t, kScalarType<T>);
  check_cpu(op, name, t);
  return *static_cast<const T*>(t.const_data_ptr());
}

}  // namespace ak
