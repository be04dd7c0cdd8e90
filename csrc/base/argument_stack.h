// The arguments of a boxed kernel. A kernel that takes a struct reads them one by one, in the order of the schema,
// where TORCH_BOX would want a function with a parameter for each.
#pragma once

#include "base/check.h"

namespace ak {

class ArgumentStack {
 public:
  ArgumentStack(StableIValue* stack, uint64_t count) : next_(stack), end_(stack + count) {}

  // The next argument, by its type in the schema; the op has no such argument if `has` is false.
  std::optional<Tensor> tensor(bool has = true) { return has ? std::optional(take<Tensor>()) : std::nullopt; }
  std::optional<Tensor> optional_tensor() { return take<std::optional<Tensor>>(); }
  TensorList tensors(bool has = true) { return has ? take<TensorList>() : TensorList(); }
  std::vector<double> numbers() { return take<std::vector<double>>(); }
  std::vector<int64_t> integers() { return take<std::vector<int64_t>>(); }
  double number() { return take<double>(); }
  int64_t integer() { return take<int64_t>(); }
  bool flag() { return take<bool>(); }

  bool empty() const { return next_ == end_; }

 private:
  template <typename T>
  T take() {
    AK_CHECK(!empty(), "the schema has fewer arguments than the kernel");
    return torch::stable::detail::to<T>(*next_++);  // owned by the caller from here on
  }

  StableIValue *next_, *end_;
};

}  // namespace ak
