// Argument checks of the op kernels, over the LibTorch stable ABI. They keep direct callers of torch.ops.amp_kernels.*
// from corrupting memory; the public Python functions check the rest. A message names the op, the argument, the value
// received and the values accepted.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/scalar_type.h"

namespace ak {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Not STD_TORCH_CHECK, which puts the function, file and line of the check in front of the message.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

#define AK_CHECK(condition, ...)     \
  do {                               \
    if (!(condition)) [[unlikely]] { \
      ::ak::fail(__VA_ARGS__);       \
    }                                \
  } while (0)

template <typename T>
inline constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;

inline constexpr std::initializer_list<ScalarType> kNarrowDtypes = {ScalarType::Half, ScalarType::BFloat16,
                                                                    ScalarType::Float};
inline constexpr std::initializer_list<ScalarType> kFloatDtypes = {ScalarType::Half, ScalarType::BFloat16,
                                                                   ScalarType::Float, ScalarType::Double};

// "grads[3]", formatted only for a message.
struct ArgName {
  const char* list;
  int64_t index = -1;
};

inline std::ostream& operator<<(std::ostream& out, const ArgName& name) {
  out << name.list;
  return name.index < 0 ? out : out << '[' << name.index << ']';
}

struct Ints {
  torch::headeronly::IntHeaderOnlyArrayRef values;
};

inline std::ostream& operator<<(std::ostream& out, const Ints& ints) {
  out << '(';
  for (size_t i = 0; i < ints.values.size(); ++i) out << (i ? ", " : "") << ints.values[i];
  return out << ')';
}

inline void check_dtype(const char* op, ArgName name, ScalarType dtype, std::initializer_list<ScalarType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), dtype) != accepted.end()) return;
  std::ostringstream list;
  const char* separator = "";
  for (ScalarType a : accepted) {
    list << separator << dtype_name(a);
    separator = ", ";
  }
  fail(op, ": ", name, " must have dtype ", list.str(), "; got ", dtype_name(dtype));
}

inline void check_dtype(const char* op, ArgName name, const Tensor& t, std::initializer_list<ScalarType> accepted) {
  check_dtype(op, name, t.scalar_type(), accepted);
}

inline void check_one_element(const char* op, ArgName name, const Tensor& t, ScalarType dtype) {
  check_dtype(op, name, t, {dtype});
  AK_CHECK(t.numel() == 1, op, ": ", name, " must have one element; got shape ", Ints{t.sizes()});
}

// True if the elements cover a contiguous span exactly once, in any order of dimensions: contiguous, channels_last,
// transposed. Such a tensor can be processed as numel() consecutive elements.
inline bool is_dense(const Tensor& t) {
  if (t.numel() == 0 || t.is_contiguous()) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline void check_dense(const char* op, ArgName name, const Tensor& t) {
  AK_CHECK(is_dense(t), op, ": ", name, " must cover its memory without gaps or overlap; got shape ", Ints{t.sizes()},
           " with strides ", Ints{t.strides()});
}

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin());
}

// Same shape and strides, ignoring strides of dimensions of size 1 and of empty tensors.
inline bool same_layout(const Tensor& a, const Tensor& b) {
  if (!same_sizes(a, b)) return false;
  if (a.numel() == 0) return true;
  const auto sizes = a.sizes(), x = a.strides(), y = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && x[i] != y[i]) return false;
  }
  return true;
}

}  // namespace ak
