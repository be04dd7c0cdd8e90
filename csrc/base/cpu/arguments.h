// Checks of CPU kernels' arguments, which must be in host memory.
#pragma once

#include "base/check.h"

namespace ak {

inline void check_cpu(const char* op, ArgName name, const Tensor& t) {
  AK_CHECK(t.is_cpu(), op, ": ", name, " must be on the CPU like the other arguments");
}

inline constexpr std::initializer_list<ScalarType> kListDtypes = {ScalarType::Half, ScalarType::BFloat16,
                                                                  ScalarType::Float, ScalarType::Double};

// Checks a list of dense tensors, which the kernel processes in memory order.
inline void check_list(const char* op, const char* argument, const TensorList& list) {
  for (size_t i = 0; i < list.size(); ++i) {
    const ArgName name{argument, static_cast<int64_t>(i)};
    check_dtype(op, name, list[i], kListDtypes);
    check_cpu(op, name, list[i]);
    check_dense(op, name, list[i]);
  }
}

template <typename T>
T* scalar_data(const char* op, ArgName name, const Tensor& t) {
  check_one_element(op, name, t, kScalarType<T>);
  check_cpu(op, name, t);
  return static_cast<T*>(t.mutable_data_ptr());
}

template <typename T>
T read_scalar(const char* op, ArgName name, const Tensor& t) {
  check_one_element(op, name, t, kScalarType<T>);
  check_cpu(op, name, t);
  return *static_cast<const T*>(t.const_data_ptr());
}

}  // namespace ak
