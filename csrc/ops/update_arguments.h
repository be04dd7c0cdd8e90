// What all updates share on every device: their arguments (blocks of flat state, see amp_kernels/ops/_blocks.py)
// and the checks that keep each access of an update inside its tensor.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "ops/check.h"

namespace ak {

enum UpdateFlag : int64_t { kMaximize = 1, kNesterov = 2, kCoupledDecay = 4 };

// A run of elements in memory; `data` is null where a block has no such state.
struct Span {
  char* data = nullptr;
  ScalarType dtype = ScalarType::Float;

  const void* as_const() const { return data; }
};

struct UpdateParam {
  int64_t numel;
  Span param, grad, master, shadow;
  Span moments[2];
  float* step;
  int64_t group;
};

// The tensor arguments of an update op, by their names in the schema.
struct UpdateTensors {
  const char* op;
  const TensorList& params;
  const TensorList& grads;
  std::vector<std::pair<const char*, const TensorList*>> moments;  // one or two
  bool moments_required;
  const TensorList& steps;
  const TensorList& masters;
  const TensorList& shadows;
  const Tensor& layout;
  const TensorList& lrs;
  const std::optional<Tensor>& grad_scale;
  const std::optional<Tensor>& found_inf;
  const std::optional<Tensor>& sum_sq;
};

// Lists with one value per group, by name and size.
inline void check_groups(const char* op, size_t groups, std::initializer_list<std::pair<const char*, size_t>> lists) {
  for (const auto& [name, size] : lists) {
    AK_CHECK(size == groups, op, ": ", name, " has ", size, " entries and lr ", groups,
             "; accepted: one per param group");
  }
}

namespace detail {

// Elements [offset, offset + numel) of a block's buffer, or nothing if the buffer is empty and may be.
inline Span piece(const UpdateTensors& t, ArgName param, const char* name, const Tensor& buffer, int64_t offset,
                  int64_t numel, bool may_be_absent) {
  const int64_t size = buffer.numel();
  if (size == 0 && may_be_absent) return {};
  AK_CHECK(offset >= 0 && numel <= size && offset <= size - numel, t.op, ": ", param, " needs ", numel,
           " elements from element ", offset, " of its block's ", name, " on, which has ", size);
  char* data = static_cast<char*>(buffer.mutable_data_ptr());
  return {data + offset * static_cast<int64_t>(buffer.element_size()), buffer.scalar_type()};
}

}  // namespace detail

// The parameters with their state. Raises unless every access the update would make is inside its tensor; changes
// nothing. `check_place(name, tensor)` raises if the kernel cannot reach the tensor; `layout` alone is always read by
// the host.
template <typename CheckPlace>
std::vector<UpdateParam> check_update_arguments(const UpdateTensors& t, int64_t groups, const CheckPlace& check_place) {
  const auto check_buffers = [&](const char* name, const TensorList& buffers,
                                 std::initializer_list<ScalarType> dtypes) {
    AK_CHECK(buffers.size() == t.steps.size(), t.op, ": ", name, " has ", buffers.size(), " entries and steps ",
             t.steps.size(), "; accepted: one per block");
    for (size_t b = 0; b < buffers.size(); ++b) {
      const ArgName arg{name, static_cast<int64_t>(b)};
      check_dtype(t.op, arg, buffers[b], dtypes);
      check_place(arg, buffers[b]);
      AK_CHECK(buffers[b].is_contiguous(), t.op, ": ", arg, " must be contiguous");
    }
  };
  const auto check_scalar = [&](ArgName name, const Tensor& scalar) {
    check_one_element(t.op, name, scalar, ScalarType::Float);
    check_place(name, scalar);
  };
  const auto check_pair = [&](size_t i) {
    const Tensor &param = t.params[i], &grad = t.grads[i];
    const ArgName p{"params", static_cast<int64_t>(i)}, g{"grads", static_cast<int64_t>(i)};
    check_dtype(t.op, p, param, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
    check_dtype(t.op, g, grad, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
    check_place(p, param);
    check_place(g, grad);
    check_dense(t.op, p, param);
    AK_CHECK(same_layout(param, grad), t.op, ": ", g, " has shape ", Ints{grad.sizes()}, " and strides ",
             Ints{grad.strides()}, ", ", p, " has shape ", Ints{param.sizes()}, " and strides ", Ints{param.strides()},
             "; they must be the same");
  };

  const int64_t count = static_cast<int64_t>(t.params.size());
  AK_CHECK(t.grads.size() == t.params.size(), t.op, ": there are ", count, " params and ", t.grads.size(), " grads");
  check_dtype(t.op, {"layout"}, t.layout, {ScalarType::Long});
  AK_CHECK(t.layout.is_cpu(), t.op, ": layout must be on the CPU");
  AK_CHECK(t.layout.dim() == 2 && t.layout.size(0) == count && t.layout.size(1) == 4 && t.layout.is_contiguous(), t.op,
           ": layout must be contiguous with shape (", count, ", 4); got shape ", Ints{t.layout.sizes()});
  check_buffers("steps", t.steps, {ScalarType::Float});
  for (const auto& [name, buffers] : t.moments)
    check_buffers(name, *buffers, {ScalarType::Float, ScalarType::BFloat16});
  check_buffers("masters", t.masters, {ScalarType::Float, ScalarType::Short});
  check_buffers("shadows", t.shadows, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  if (!t.lrs.empty()) check_groups(t.op, static_cast<size_t>(groups), {{"lrs", t.lrs.size()}});
  for (size_t i = 0; i < t.lrs.size(); ++i) check_scalar({"lrs", static_cast<int64_t>(i)}, t.lrs[i]);
  if (t.grad_scale) check_scalar({"grad_scale"}, *t.grad_scale);
  if (t.found_inf) check_scalar({"found_inf"}, *t.found_inf);
  if (t.sum_sq) check_scalar({"sum_sq"}, *t.sum_sq);

  const int64_t* row = static_cast<const int64_t*>(t.layout.const_data_ptr());
  const int64_t blocks = static_cast<int64_t>(t.steps.size());
  std::vector<UpdateParam> result;
  result.reserve(t.params.size());
  for (int64_t i = 0; i < count; ++i, row += 4) {
    const ArgName name{"params", i};
    check_pair(static_cast<size_t>(i));
    const Tensor &param = t.params[static_cast<size_t>(i)], &grad = t.grads[static_cast<size_t>(i)];
    const int64_t block = row[0], offset = row[1], slot = row[2], group = row[3], numel = param.numel();
    AK_CHECK(block >= 0 && block < blocks, t.op, ": layout[", i, "] names block ", block, "; there are ", blocks);
    AK_CHECK(group >= 0 && group < groups, t.op, ": layout[", i, "] names group ", group, "; there are ", groups);
    const size_t b = static_cast<size_t>(block);

    UpdateParam p{};
    p.numel = numel;
    p.group = group;
    p.param = {static_cast<char*>(param.mutable_data_ptr()), param.scalar_type()};
    p.grad = {const_cast<char*>(static_cast<const char*>(grad.const_data_ptr())), grad.scalar_type()};
    p.step = reinterpret_cast<float*>(detail::piece(t, name, "steps", t.steps[b], slot, 1, false).data);
    for (size_t k = 0; k < t.moments.size(); ++k) {
      p.moments[k] =
          detail::piece(t, name, t.moments[k].first, (*t.moments[k].second)[b], offset, numel, !t.moments_required);
    }
    p.master = detail::piece(t, name, "masters", t.masters[b], offset, numel, true);
    p.shadow = detail::piece(t, name, "shadows", t.shadows[b], offset, numel, true);
    AK_CHECK(!p.master.data || is_half(p.param.dtype), t.op, ": ", name, " is ", dtype_name(p.param.dtype),
             " and its block has masters; accepted: float16, bfloat16");
    AK_CHECK(!p.shadow.data || (p.param.dtype == ScalarType::Float && is_half(p.shadow.dtype)), t.op, ": ", name,
             " is ", dtype_name(p.param.dtype), " and its block has ", dtype_name(p.shadow.dtype),
             " shadows; accepted: float16 or bfloat16 shadows of float32 params");
    result.push_back(p);
  }
  return result;
}

}  // namespace ak
