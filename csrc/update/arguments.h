// What all updates share on every device: their arguments (blocks of flat state, see amp_kernels/_updates/state.py), the
// checks that keep each access of an update inside its tensor, and the registration of a rule's ops.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/tensor_table.h"
#include "update/rule.h"

namespace ak {

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

// The arguments of an update op, by their names in the schema.
struct UpdateArguments {
  const char* op;
  const TensorList &params, &grads;  // none with a table
  const Tensor& places;              // `layout`, or the table
  bool table;
  const TensorList &moments, &steps, &masters, &shadows, &emas, &lrs, &weight_decays;
  const std::optional<Tensor>&grad_scale, &found_inf, &sum_sq;
  const std::vector<double>&options, &ema_decay;
  const std::vector<int64_t>& flags;
  double max_norm;
  int64_t seed;
  const Tensor* squares = nullptr;  // of half a step
  bool second = true;               // which half

  int64_t tensors() const { return table ? places.numel() / kTableColumns : static_cast<int64_t>(params.size()); }

  template <typename Rule>
  typename Rule::Options options_of(size_t group) const {
    return Rule::options(options.data() + group * Rule::kOptions, flags[group]);
  }
};

// The op of a rule, and the one for optimizers alone, which takes addresses (base/tensor_table.h). step(arguments)
// takes the step.
template <typename Rule, auto step>
void update_op(const TensorList& params, const TensorList& grads, const TensorList& moments, const TensorList& steps,
               const TensorList& masters, const TensorList& shadows, const TensorList& emas, const Tensor& layout,
               const TensorList& lrs, const TensorList& weight_decays, const std::optional<Tensor>& grad_scale,
               const std::optional<Tensor>& found_inf, const std::optional<Tensor>& sum_sq,
               const std::vector<double>& options, const std::vector<double>& ema_decay,
               const std::vector<int64_t>& flags, double max_norm, int64_t seed) {
  step(UpdateArguments{Rule::kName, params,  grads,     layout, false,         moments,    steps,
                       masters,     shadows, emas,      lrs,    weight_decays, grad_scale, found_inf,
                       sum_sq,      options, ema_decay, flags,  max_norm,      seed});
}

template <typename Rule, auto step>
void update_table_op(const Tensor& table, const TensorList& moments, const TensorList& steps, const TensorList& masters,
                     const TensorList& shadows, const TensorList& emas, const TensorList& lrs,
                     const TensorList& weight_decays, const std::optional<Tensor>& grad_scale,
                     const std::optional<Tensor>& found_inf, const std::optional<Tensor>& sum_sq,
                     const std::vector<double>& options, const std::vector<double>& ema_decay,
                     const std::vector<int64_t>& flags, double max_norm, int64_t seed) {
  const TensorList none;
  step(UpdateArguments{Rule::kName, none,    none,      table, true,          moments,    steps,
                       masters,     shadows, emas,      lrs,   weight_decays, grad_scale, found_inf,
                       sum_sq,      options, ema_decay, flags, max_norm,      seed});
}

// Half a step of a rule that needs norms of whole tensors, where these are pieces (UpdateOp.half in _updates/op.py).
template <typename Rule, auto step>
void update_half_op(const TensorList& params, const TensorList& grads, const TensorList& moments,
                    const TensorList& steps, const TensorList& masters, const TensorList& shadows,
                    const TensorList& emas, const Tensor& layout, const TensorList& lrs,
                    const TensorList& weight_decays, const std::optional<Tensor>& grad_scale,
                    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& sum_sq,
                    const std::vector<double>& options, const std::vector<double>& ema_decay,
                    const std::vector<int64_t>& flags, double max_norm, int64_t seed, const Tensor& squares,
                    bool second) {
  static const std::string name = std::string(Rule::kName).append("half_");
  step(UpdateArguments{name.c_str(), params, grads,    layout,        false,      moments,   steps,  masters,
                       shadows,      emas,   lrs,      weight_decays, grad_scale, found_inf, sum_sq, options,
                       ema_decay,    flags,  max_norm, seed,          &squares,   second});
}

template <typename Rule, auto step>
void update_half_table_op(const Tensor& table, const TensorList& moments, const TensorList& steps,
                          const TensorList& masters, const TensorList& shadows, const TensorList& emas,
                          const TensorList& lrs, const TensorList& weight_decays,
                          const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                          const std::optional<Tensor>& sum_sq, const std::vector<double>& options,
                          const std::vector<double>& ema_decay, const std::vector<int64_t>& flags, double max_norm,
                          int64_t seed, const Tensor& squares, bool second) {
  const TensorList none;
  step(UpdateArguments{Rule::kName, none,  none,     table,         true,       moments,   steps,  masters,
                       shadows,     emas,  lrs,      weight_decays, grad_scale, found_inf, sum_sq, options,
                       ema_decay,   flags, max_norm, seed,          &squares,   second});
}

template <typename Rule>
inline constexpr bool kNeedsNorms = requires { &Rule::rate_of; };

template <typename Rule, auto step>
void register_update(torch::stable::detail::StableLibrary& library) {
  library.impl(Rule::kName, TORCH_BOX((&update_op<Rule, step>)));
  library.impl(std::string("_").append(Rule::kName).append("table_").c_str(),
               TORCH_BOX((&update_table_op<Rule, step>)));
  if constexpr (kNeedsNorms<Rule>) {
    library.impl(std::string(Rule::kName).append("half_").c_str(), TORCH_BOX((&update_half_op<Rule, step>)));
    library.impl(std::string("_").append(Rule::kName).append("half_table_").c_str(),
                 TORCH_BOX((&update_half_table_op<Rule, step>)));
  }
}

namespace detail {

// One buffer of a block; `size` in elements. Looked up once, whatever the number of parameters.
struct Buffer {
  ArgName name;
  Span span;
  int64_t size, element_size;

  static Buffer of(ArgName name, const Tensor& buffer) {
    return {name,
            {static_cast<char*>(buffer.mutable_data_ptr()), buffer.scalar_type()},
            buffer.numel(),
            static_cast<int64_t>(buffer.element_size())};
  }

  // Elements [offset, offset + numel), or nothing if the buffer is empty and may be.
  Span piece(const char* op, ArgName param, int64_t offset, int64_t numel, bool may_be_absent) const {
    if (size == 0 && may_be_absent) return {};
    AK_CHECK(offset >= 0 && numel <= size && offset <= size - numel, op, ": ", param, " needs ", numel,
             " elements from element ", offset, " of ", name, " on, which has ", size);
    return {span.data + offset * element_size, span.dtype};
  }
};

struct BlockBuffers {
  Buffer steps, master, shadow, ema;
  Buffer moments[UpdateParam::kMaxMoments];
};

// A row of the layout, with the parameter and the gradient it is about.
struct PlacedParam {
  Span param, grad;
  int64_t numel, block, offset, slot, group, index;
};

template <typename Rule>
UpdateParam with_state(const UpdateArguments& t, const std::vector<BlockBuffers>& blocks, const PlacedParam& row,
                       int64_t i) {
  const ArgName name{"params", i}, place{t.table ? "table" : "layout", i};
  const int64_t count = static_cast<int64_t>(blocks.size()), groups = static_cast<int64_t>(t.flags.size());
  AK_CHECK(row.block >= 0 && row.block < count, t.op, ": ", place, " names block ", row.block, "; there are ", count);
  AK_CHECK(row.group >= 0 && row.group < groups, t.op, ": ", place, " names group ", row.group, "; there are ", groups);
  AK_CHECK(row.index >= 0 && row.index <= UINT32_MAX, t.op, ": ", place, " has index ", row.index, "; accepted: 0 to ",
           UINT32_MAX);
  const BlockBuffers& b = blocks[static_cast<size_t>(row.block)];

  UpdateParam p{};
  p.numel = row.numel;
  p.group = row.group;
  p.index = static_cast<uint32_t>(row.index);
  p.param = row.param;
  p.grad = row.grad;
  p.step = reinterpret_cast<float*>(b.steps.piece(t.op, name, row.slot, 1, false).data);
  for (int k = 0; k < Rule::kMoments; ++k) {
    p.moments[k] = b.moments[k].piece(t.op, name, row.offset, row.numel, k >= Rule::kRequiredMoments);
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

inline constexpr std::initializer_list<ScalarType> kParamDtypes = {ScalarType::Half, ScalarType::BFloat16,
                                                                   ScalarType::Float};

// A row of the table.
inline PlacedParam placed_param(const char* op, const TableRow& r, int64_t i) {
  const ArgName p{"params", i}, g{"grads", i};
  const ScalarType param = table_dtype(op, p, r.param_dtype, kParamDtypes);
  const ScalarType grad = table_dtype(op, g, r.grad_dtype, kParamDtypes);
  return {{table_address(op, p, r.param, r.numel, param), param},
          {table_address(op, g, r.grad, r.numel, grad), grad},
          r.numel,
          r.block,
          r.offset,
          r.slot,
          r.group,
          r.index};
}

// A parameter and a gradient of the lists, with their row of the layout.
inline PlacedParam placed_param(const char* op, const Tensor& param, const Tensor& grad, const int64_t* row,
                                int64_t i) {
  const ArgName p{"params", i}, g{"grads", i};
  check_dtype(op, p, param, kParamDtypes);
  check_dtype(op, g, grad, kParamDtypes);
  check_dense(op, p, param);
  AK_CHECK(same_layout(param, grad), op, ": ", g, " has shape ", Ints{grad.sizes()}, " and strides ",
           Ints{grad.strides()}, ", ", p, " has shape ", Ints{param.sizes()}, " and strides ", Ints{param.strides()},
           "; they must be the same");
  char* const grad_at = const_cast<char*>(static_cast<const char*>(grad.const_data_ptr()));
  return {{static_cast<char*>(param.mutable_data_ptr()), param.scalar_type()},
          {grad_at, grad.scalar_type()},
          param.numel(),
          row[0],
          row[1],
          row[2],
          row[3],
          row[4]};
}

template <typename CheckPlace, typename Visit>
void for_each_param(const UpdateArguments& t, const CheckPlace& check_place, const Visit& visit) {
  if (t.table) {
    int64_t i = 0;
    for (const TableRow& row : table_rows(t.op, {"table"}, t.places)) visit(placed_param(t.op, row, i++));
    return;
  }
  const int64_t count = static_cast<int64_t>(t.params.size());
  AK_CHECK(t.grads.size() == t.params.size(), t.op, ": there are ", count, " params and ", t.grads.size(), " grads");
  check_dtype(t.op, {"layout"}, t.places, {ScalarType::Long});
  AK_CHECK(t.places.is_cpu(), t.op, ": layout must be on the CPU");
  AK_CHECK(t.places.dim() == 2 && t.places.size(0) == count && t.places.size(1) == 5 && t.places.is_contiguous(), t.op,
           ": layout must be contiguous with shape (", count, ", 5); got shape ", Ints{t.places.sizes()});
  const int64_t* row = static_cast<const int64_t*>(t.places.const_data_ptr());
  for (int64_t i = 0; i < count; ++i, row += 5) {
    const Tensor &param = t.params[static_cast<size_t>(i)], &grad = t.grads[static_cast<size_t>(i)];
    check_place({"params", i}, param);
    check_place({"grads", i}, grad);
    visit(placed_param(t.op, param, grad, row, i));
  }
}

}  // namespace detail

// The parameters with their state. Raises unless every access the update would make is inside its tensor; changes
// nothing. `check_place(name, tensor)` raises if the kernel cannot reach the tensor; `places` alone is always read by
// the host.
template <typename Rule, typename CheckPlace>
std::vector<UpdateParam> check_update_arguments(const UpdateArguments& t, const CheckPlace& check_place) {
  static_assert(Rule::kMoments <= UpdateParam::kMaxMoments);
  const auto check_buffers = [&](const char* name, const TensorList& buffers, size_t per_block,
                                 std::initializer_list<ScalarType> dtypes) {
    AK_CHECK(buffers.size() == per_block * t.steps.size(), t.op, ": ", name, " has ", buffers.size(),
             " entries and steps ", t.steps.size(), "; accepted: ", per_block, " per block");
    for (size_t b = 0; b < buffers.size(); ++b) {
      const ArgName arg{name, static_cast<int64_t>(b)};
      check_dtype(t.op, arg, buffers[b], dtypes);
      check_place(arg, buffers[b]);
      AK_CHECK(buffers[b].is_contiguous(), t.op, ": ", arg, " must be contiguous");
    }
  };
  const auto check_groups = [&](const char* name, size_t size, size_t per_group) {
    AK_CHECK(size == per_group * t.flags.size(), t.op, ": ", name, " has ", size, " entries and flags ", t.flags.size(),
             "; accepted: ", per_group, " per param group");
  };
  const auto check_scalar = [&](ArgName name, const Tensor& scalar, ScalarType dtype = ScalarType::Float) {
    check_one_element(t.op, name, scalar, dtype);
    check_place(name, scalar);
  };
  const auto check_numbers = [&](const char* name, const TensorList& scalars, ScalarType dtype) {
    if (!scalars.empty()) check_groups(name, scalars.size(), 1);
    for (size_t i = 0; i < scalars.size(); ++i) check_scalar({name, static_cast<int64_t>(i)}, scalars[i], dtype);
  };

  check_buffers("steps", t.steps, 1, {ScalarType::Float});
  check_buffers("moments", t.moments, Rule::kMoments, {ScalarType::Float, ScalarType::BFloat16});
  check_buffers("masters", t.masters, 1, {ScalarType::Float, ScalarType::Short});
  check_buffers("shadows", t.shadows, 1, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_buffers("emas", t.emas, 1, {ScalarType::Float});
  check_groups("options", t.options.size(), Rule::kOptions);
  check_groups("ema_decay", t.ema_decay.size(), 1);
  check_numbers("lrs", t.lrs, ScalarType::Float);
  check_numbers("weight_decays", t.weight_decays, ScalarType::Double);
  if (t.grad_scale) check_scalar({"grad_scale"}, *t.grad_scale);
  if (t.found_inf) check_scalar({"found_inf"}, *t.found_inf);
  if (t.sum_sq) check_scalar({"sum_sq"}, *t.sum_sq);
  if (t.squares) {
    check_dtype(t.op, {"squares"}, *t.squares, {ScalarType::Double});
    check_place({"squares"}, *t.squares);
    const int64_t count = t.tensors();
    AK_CHECK(
        t.squares->dim() == 2 && t.squares->size(0) == count && t.squares->size(1) == 2 && t.squares->is_contiguous(),
        t.op, ": squares must be contiguous with shape (", count, ", 2); got shape ", Ints{t.squares->sizes()});
    AK_CHECK(reinterpret_cast<uintptr_t>(t.squares->const_data_ptr()) % 16 == 0, t.op,
             ": squares must begin at a multiple of 16 bytes, as its rows are read");
  }

  std::vector<detail::BlockBuffers> blocks(t.steps.size());
  for (size_t b = 0; b < blocks.size(); ++b) {
    const auto buffer = [&](const char* name, const TensorList& buffers, size_t at) {
      return detail::Buffer::of({name, static_cast<int64_t>(at)}, buffers[at]);
    };
    blocks[b] = {buffer("steps", t.steps, b),
                 buffer("masters", t.masters, b),
                 buffer("shadows", t.shadows, b),
                 buffer("emas", t.emas, b),
                 {}};
    for (size_t k = 0; k < Rule::kMoments; ++k) {
      blocks[b].moments[k] = buffer("moments", t.moments, k * blocks.size() + b);
    }
  }
  std::vector<UpdateParam> result;
  result.reserve(static_cast<size_t>(t.tensors()));
  detail::for_each_param(t, check_place, [&](const detail::PlacedParam& param) {
    result.push_back(detail::with_state<Rule>(t, blocks, param, static_cast<int64_t>(result.size())));
  });
  return result;
}

}  // namespace ak
