// What all updates share on every device: their arguments (blocks of flat state, see amp_kernels/ops/_blocks.py)
// and the checks that keep each access of an update inside its tensor.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "ops/check.h"
#include "ops/tensor_table.h"

namespace ak {

// Bits of a group's flags. kStochastic: 16-bit parameters without a master are rounded stochastically (math/philox.h).
enum UpdateFlag : int64_t {
  kMaximize = 1,
  kNesterov = 2,
  kCoupledDecay = 4,
  kStochastic = 8,
  kNoBiasCorrection = 16,
  kAdaptAll = 32
};

// A run of elements in memory; `data` is null where a block has no such state.
struct Span {
  char* data = nullptr;
  ScalarType dtype = ScalarType::Float;

  const void* as_const() const { return data; }
};

struct UpdateParam {
  static constexpr int kMaxMoments = 3;

  int64_t numel;
  Span param, grad, master, shadow, ema;
  Span moments[kMaxMoments];
  float* step;
  int64_t group;
  uint32_t index;  // the parameter's number in the optimizer, part of the key of its random bits
};

// One kind of state, a buffer per block. `required`: no block may be without it.
struct MomentBuffers {
  const char* name;
  const TensorList* buffers;
  bool required = true;
};

// The tensor arguments of an update op, by their names in the schema. With empty `params` and `grads`, `layout` may be
// a table (ops/tensor_table.h).
struct UpdateTensors {
  const char* op;
  const TensorList& params;
  const TensorList& grads;
  std::vector<MomentBuffers> moments;  // one to UpdateParam::kMaxMoments
  const TensorList& steps;
  const TensorList& masters;
  const TensorList& shadows;
  const TensorList& emas;
  const Tensor& layout;
  const TensorList& lrs;
  const std::optional<Tensor>& grad_scale;
  const std::optional<Tensor>& found_inf;
  const std::optional<Tensor>& sum_sq;
};

// The numbers that every update op takes; one value per group where it is a list.
struct UpdateNumbers {
  const std::vector<double>& lr;
  const std::vector<double>& ema_decay;
  const std::vector<int64_t>& flags;
  double max_norm;
  int64_t seed;
};

// Lists with one value per group, by name and size.
inline void check_groups(const char* op, size_t groups, std::initializer_list<std::pair<const char*, size_t>> lists) {
  for (const auto& [name, size] : lists) {
    AK_CHECK(size == groups, op, ": ", name, " has ", size, " entries and lr ", groups,
             "; accepted: one per param group");
  }
}

inline bool has_table(const UpdateTensors& t) {
  return t.params.empty() && t.layout.dim() == 2 && t.layout.size(1) == kTableColumns;
}

namespace detail {

// One buffer of a block; `size` in elements. Looked up once, whatever the number of parameters.
struct Buffer {
  const char* name;
  Span span;
  int64_t size, element_size;

  static Buffer of(const char* name, const Tensor& buffer) {
    return {name,
            {static_cast<char*>(buffer.mutable_data_ptr()), buffer.scalar_type()},
            buffer.numel(),
            static_cast<int64_t>(buffer.element_size())};
  }

  // Elements [offset, offset + numel), or nothing if the buffer is empty and may be.
  Span piece(const char* op, ArgName param, int64_t offset, int64_t numel, bool may_be_absent) const {
    if (size == 0 && may_be_absent) return {};
    AK_CHECK(offset >= 0 && numel <= size && offset <= size - numel, op, ": ", param, " needs ", numel,
             " elements from element ", offset, " of its block's ", name, " on, which has ", size);
    return {span.data + offset * element_size, span.dtype};
  }
};

struct BlockBuffers {
  Buffer steps, master, shadow, ema;
  std::vector<Buffer> moments;
};

// A row of the layout, with the parameter and the gradient it is about.
struct PlacedParam {
  Span param, grad;
  int64_t numel, block, offset, slot, group, index;
};

inline UpdateParam with_state(const UpdateTensors& t, const std::vector<BlockBuffers>& blocks, int64_t groups,
                              const PlacedParam& row, int64_t i) {
  const ArgName name{"params", i};
  const int64_t count = static_cast<int64_t>(blocks.size());
  AK_CHECK(row.block >= 0 && row.block < count, t.op, ": layout[", i, "] names block ", row.block, "; there are ",
           count);
  AK_CHECK(row.group >= 0 && row.group < groups, t.op, ": layout[", i, "] names group ", row.group, "; there are ",
           groups);
  AK_CHECK(row.index >= 0 && row.index <= UINT32_MAX, t.op, ": layout[", i, "] has index ", row.index,
           "; accepted: 0 to ", UINT32_MAX);
  const BlockBuffers& b = blocks[static_cast<size_t>(row.block)];

  UpdateParam p{};
  p.numel = row.numel;
  p.group = row.group;
  p.index = static_cast<uint32_t>(row.index);
  p.param = row.param;
  p.grad = row.grad;
  p.step = reinterpret_cast<float*>(b.steps.piece(t.op, name, row.slot, 1, false).data);
  for (size_t k = 0; k < t.moments.size(); ++k) {
    p.moments[k] = b.moments[k].piece(t.op, name, row.offset, row.numel, !t.moments[k].required);
  }
  p.master = b.master.piece(t.op, name, row.offset, row.numel, true);
  p.shadow = b.shadow.piece(t.op, name, row.offset, row.numel, true);
  p.ema = b.ema.piece(t.op, name, row.offset, row.numel, true);
  AK_CHECK(!p.master.data || is_half(p.param.dtype), t.op, ": ", name, " is ", dtype_name(p.param.dtype),
           " and its block has masters; accepted: float16, bfloat16");
  AK_CHECK(!p.shadow.data || (p.param.dtype == ScalarType::Float && is_half(p.shadow.dtype)), t.op, ": ", name, " is ",
           dtype_name(p.param.dtype), " and its block has ", dtype_name(p.shadow.dtype),
           " shadows; accepted: float16 or bfloat16 shadows of float32 params");
  return p;
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
  const bool table = has_table(t);
  if (!table) {
    check_dtype(t.op, {"layout"}, t.layout, {ScalarType::Long});
    AK_CHECK(t.layout.is_cpu(), t.op, ": layout must be on the CPU");
    AK_CHECK(t.layout.dim() == 2 && t.layout.size(0) == count && t.layout.size(1) == 5 && t.layout.is_contiguous(),
             t.op, ": layout must be contiguous with shape (", count, ", 5); got shape ", Ints{t.layout.sizes()});
  }
  check_buffers("steps", t.steps, {ScalarType::Float});
  for (const MomentBuffers& m : t.moments) check_buffers(m.name, *m.buffers, {ScalarType::Float, ScalarType::BFloat16});
  check_buffers("masters", t.masters, {ScalarType::Float, ScalarType::Short});
  check_buffers("shadows", t.shadows, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_buffers("emas", t.emas, {ScalarType::Float});
  if (!t.lrs.empty()) check_groups(t.op, static_cast<size_t>(groups), {{"lrs", t.lrs.size()}});
  for (size_t i = 0; i < t.lrs.size(); ++i) check_scalar({"lrs", static_cast<int64_t>(i)}, t.lrs[i]);
  if (t.grad_scale) check_scalar({"grad_scale"}, *t.grad_scale);
  if (t.found_inf) check_scalar({"found_inf"}, *t.found_inf);
  if (t.sum_sq) check_scalar({"sum_sq"}, *t.sum_sq);

  std::vector<detail::BlockBuffers> blocks;
  blocks.reserve(t.steps.size());
  for (size_t b = 0; b < t.steps.size(); ++b) {
    using detail::Buffer;
    std::vector<Buffer> moments;
    for (const MomentBuffers& m : t.moments) moments.push_back(Buffer::of(m.name, (*m.buffers)[b]));
    blocks.push_back({Buffer::of("steps", t.steps[b]), Buffer::of("masters", t.masters[b]),
                      Buffer::of("shadows", t.shadows[b]), Buffer::of("emas", t.emas[b]), std::move(moments)});
  }
  std::vector<UpdateParam> result;
  if (table) {
    const auto rows = table_rows(t.op, {"layout"}, t.layout);
    result.reserve(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const TableRow& r = rows[i];
      const int64_t at = static_cast<int64_t>(i);
      const ArgName p{"params", at}, g{"grads", at};
      const auto accepted = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
      const ScalarType param = table_dtype(t.op, p, r.param_dtype, accepted);
      const ScalarType grad = table_dtype(t.op, g, r.grad_dtype, accepted);
      const detail::PlacedParam row{{table_address(t.op, p, r.param, r.numel, param), param},
                                    {table_address(t.op, g, r.grad, r.numel, grad), grad},
                                    r.numel,
                                    r.block,
                                    r.offset,
                                    r.slot,
                                    r.group,
                                    r.index};
      result.push_back(detail::with_state(t, blocks, groups, row, at));
    }
    return result;
  }
  const int64_t* row = static_cast<const int64_t*>(t.layout.const_data_ptr());
  result.reserve(t.params.size());
  for (int64_t i = 0; i < count; ++i, row += 5) {
    check_pair(static_cast<size_t>(i));
    const Tensor &param = t.params[static_cast<size_t>(i)], &grad = t.grads[static_cast<size_t>(i)];
    char* const grad_at = const_cast<char*>(static_cast<const char*>(grad.const_data_ptr()));
    const detail::PlacedParam placed{{static_cast<char*>(param.mutable_data_ptr()), param.scalar_type()},
                                     {grad_at, grad.scalar_type()},
                                     param.numel(),
                                     row[0],
                                     row[1],
                                     row[2],
                                     row[3],
                                     row[4]};
    result.push_back(detail::with_state(t, blocks, groups, placed, i));
  }
  return result;
}

}  // namespace ak
