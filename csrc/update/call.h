// The call of an update op on any device: its arguments, unpacked once, the checks that keep every access of the step
// inside its tensor, and the registration of a rule's ops. State is stored in flat blocks, see
// amp_kernels/_updates/state.py.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "base/argument_stack.h"
#include "base/block8.h"
#include "base/tensor_table.h"
#include "update/rule.h"
#include "update/update.h"

namespace ak {

// A rule has up to four ops: over lists or over a table, a whole step or one half of it.
struct UpdateVariant {
  const char* op;
  bool table, half;
};

struct UpdateCall {
  UpdateVariant variant;
  ArgumentStack in;

  // The arguments in the order of the schema, which is that of UpdateArguments in amp_kernels/_updates/arguments.py.
  std::optional<Tensor> table = in.tensor(variant.table);
  TensorList params = in.tensors(!variant.table);
  TensorList grads = in.tensors(!variant.table);
  TensorList moments = in.tensors();
  TensorList steps = in.tensors();
  TensorList masters = in.tensors();
  TensorList shadows = in.tensors();
  TensorList emas = in.tensors();
  std::optional<Tensor> layout = in.tensor(!variant.table);
  TensorList lrs = in.tensors();
  TensorList weight_decays = in.tensors();
  std::optional<Tensor> grad_scale = in.optional_tensor();
  std::optional<Tensor> found_inf = in.optional_tensor();
  std::optional<Tensor> sum_sq = in.optional_tensor();
  std::vector<double> options = in.numbers();
  std::vector<double> ema_decay = in.numbers();
  std::vector<int64_t> flags = in.integers();
  double max_norm = in.number();
  int64_t seed = in.integer();
  std::optional<Tensor> factors = in.optional_tensor();
  std::optional<Tensor> squares = in.tensor(variant.half);
  bool second = !variant.half || in.flag();

  const char* op() const { return variant.op; }

  int64_t tensors() const { return table ? table->numel() / kTableColumns : static_cast<int64_t>(params.size()); }

  template <typename Rule>
  typename Rule::Options options_of(size_t group) const {
    return Rule::options(options.data() + group * Rule::kOptions, flags[group]);
  }

  StepHalf half() const { return {squares ? static_cast<double*>(squares->mutable_data_ptr()) : nullptr, second}; }
};

// take_step(call) takes the step.
template <typename Rule, auto take_step, bool kTable, bool kHalf>
void boxed_update(StableIValue* stack, uint64_t inputs, uint64_t) {
  static const std::string op = std::string(Rule::kName) + (kHalf ? "half_" : "");
  const UpdateCall call{{op.c_str(), kTable, kHalf}, {stack, inputs}};
  AK_CHECK(call.in.empty(), op, ": the schema has more arguments than the kernel");
  take_step(call);
}

template <typename Rule, auto take_step>
void register_update(torch::stable::detail::StableLibrary& library) {
  const std::string name = Rule::kName;
  library.impl(Rule::kName, &boxed_update<Rule, take_step, false, false>);
  library.impl(("_" + name + "table_").c_str(), &boxed_update<Rule, take_step, true, false>);
  if constexpr (kHasStage<Rule>) {
    library.impl((name + "half_").c_str(), &boxed_update<Rule, take_step, false, true>);
    library.impl(("_" + name + "half_table_").c_str(), &boxed_update<Rule, take_step, true, true>);
  }
}

namespace detail {

inline constexpr std::initializer_list<ScalarType> kParamDtypes = {ScalarType::Half, ScalarType::BFloat16,
                                                                   ScalarType::Float};

// A buffer of a block, looked up once for all its parameters; `size` in elements.
struct BlockBuffer {
  ArgName name;
  char* data;
  ScalarType dtype;
  int64_t size, element_size;

  BlockBuffer(const char* list, const TensorList& buffers, size_t at)
      : name{list, static_cast<int64_t>(at)},
        data(static_cast<char*>(buffers[at].mutable_data_ptr())),
        dtype(buffers[at].scalar_type()),
        size(buffers[at].numel()),
        element_size(static_cast<int64_t>(buffers[at].element_size())) {}

  // Elements [offset, offset + numel); null if the buffer is empty and optional.
  void* piece(const char* op, ArgName param, int64_t offset, int64_t numel, bool optional) const {
    if (size == 0 && optional) return nullptr;
    AK_CHECK(offset >= 0 && numel <= size && offset <= size - numel, op, ": ", param, " needs ", numel,
             " elements from element ", offset, " of ", name, " on, which has ", size);
    return data + offset * element_size;
  }
};

struct Block {
  BlockBuffer steps, master, shadow, ema;
  std::vector<BlockBuffer> moments;
  DType shadow_dtype, moment_dtypes[kMaxMoments];
};

// Moments in 8 bits: a code an element, then an exponent for each 32 codes.
inline int64_t codes_of(const BlockBuffer& moment) { return moment.size / (kBlock8 + 1) * kBlock8; }

// `first`: moment 0 of the block.
inline void check_moment(const char* op, const BlockBuffer& moment, const BlockBuffer& first) {
  const bool in_8_bits = moment.dtype == ScalarType::Byte;
  AK_CHECK(in_8_bits == (first.dtype == ScalarType::Byte), op, ": ", moment.name, " is ", dtype_name(moment.dtype),
           " and ", first.name, " ", dtype_name(first.dtype), "; accepted: uint8 for all moments of a block, or none");
  AK_CHECK(!in_8_bits || moment.size % (kBlock8 + 1) == 0, op, ": ", moment.name, " is uint8 and has ", moment.size,
           " elements; accepted: a multiple of ", kBlock8 + 1, ", a byte an element and one for each ", kBlock8);
}

template <typename Rule>
std::vector<Block> blocks_of(const UpdateCall& call) {
  std::vector<Block> blocks;
  blocks.reserve(call.steps.size());
  for (size_t b = 0; b < call.steps.size(); ++b) {
    blocks.push_back({{"steps", call.steps, b},
                      {"masters", call.masters, b},
                      {"shadows", call.shadows, b},
                      {"emas", call.emas, b},
                      {},
                      dtype_of(call.shadows[b].scalar_type()),
                      {}});
    for (size_t k = 0; k < Rule::kMoments; ++k) {
      const BlockBuffer& moment = blocks[b].moments.emplace_back("moments", call.moments, k * call.steps.size() + b);
      if (moment.dtype != ScalarType::Byte) blocks[b].moment_dtypes[k] = dtype_of(moment.dtype);
      if (moment.size > 0) check_moment(call.op(), moment, blocks[b].moments[0]);
    }
  }
  return blocks;
}

inline uint8_t* exponents_of(const char* op, ArgName param, const BlockBuffer& moment, const TableRow& row) {
  const int64_t codes = codes_of(moment);
  AK_CHECK(row.offset % kBlock8 == 0, op, ": ", param, " begins at element ", row.offset, " of ", moment.name,
           ", which is uint8; accepted: a multiple of ", kBlock8);
  AK_CHECK(row.numel <= codes - row.offset, op, ": ", param, " needs ", row.numel, " elements from element ",
           row.offset, " of ", moment.name, " on, which has ", codes, " and their exponents");
  return reinterpret_cast<uint8_t*>(moment.data) + codes + row.offset / kBlock8;
}

// The place of the row's random bits.
inline RandomPlace place_of(const char* op, ArgName place, const TableRow& row) {
  constexpr int64_t kGroup = 8, kMost = int64_t{1} << 34;
  AK_CHECK(row.index >= 0, op, ": ", place, " has index ", row.index, "; accepted: 0 to ", INT64_MAX);
  if (row.width != 0 || row.pitch != 0) {
    AK_CHECK(row.width > 0 && row.width <= row.pitch && row.pitch <= kMost && row.width % kBlock8 == 0 &&
                 row.pitch % kBlock8 == 0,
             op, ": ", place, " has width ", row.width, " and pitch ", row.pitch, "; accepted: multiples of ", kBlock8,
             ", a width of at most the pitch and a pitch of at most 2^34, or 0 and 0");
    AK_CHECK(row.numel % row.width == 0 && row.numel <= kMost, op, ": ", place, " has width ", row.width, " and ",
             row.numel, " elements; accepted: whole rows, at most 2^34 elements");
  }
  const uint64_t first = static_cast<uint64_t>(row.index) / (uint64_t{1} << 32) * (kBlock8 / kGroup);
  return random_place(static_cast<uint32_t>(row.index), first, static_cast<uint32_t>(row.width / kGroup),
                      static_cast<uint32_t>(row.pitch / kGroup));
}

inline Master master_kind(ScalarType dtype) {
  return dtype == ScalarType::Short ? Master::kSplit : dtype == ScalarType::Char ? Master::kSplit24 : Master::kFloat32;
}

// The parameter of a row whose addresses, size and dtypes are known to be right.
template <typename Rule>
Param param_of(const UpdateCall& call, const std::vector<Block>& blocks, const TableRow& row, int64_t i) {
  const char* const op = call.op();
  const ArgName name{"params", i}, place{call.variant.table ? "table" : "layout", i};
  const int64_t count = static_cast<int64_t>(blocks.size()), groups = static_cast<int64_t>(call.flags.size());
  AK_CHECK(row.block >= 0 && row.block < count, op, ": ", place, " names block ", row.block, "; there are ", count);
  AK_CHECK(row.group >= 0 && row.group < groups, op, ": ", place, " names group ", row.group, "; there are ", groups);
  const Block& block = blocks[static_cast<size_t>(row.block)];
  const ScalarType dtype = static_cast<ScalarType>(row.param_dtype);
  const auto piece = [&](const BlockBuffer& buffer, bool optional = true) {
    return buffer.piece(op, name, row.offset, row.numel, optional);
  };

  Param p{};
  p.numel = row.numel;
  p.shape = {row.rows, row.columns};
  p.param = reinterpret_cast<void*>(row.param);
  p.grad = reinterpret_cast<const void*>(row.grad);
  p.param_dtype = dtype_of(dtype);
  p.grad_dtype = dtype_of(static_cast<ScalarType>(row.grad_dtype));
  p.step = static_cast<float*>(block.steps.piece(op, name, row.slot, 1, false));
  for (size_t k = 0; k < Rule::kMoments; ++k) {
    const BlockBuffer& moment = block.moments[k];
    p.moments[k] = piece(moment, k >= Rule::kRequiredMoments);
    p.moment_dtypes[k] = block.moment_dtypes[k];
    if (p.moments[k] && moment.dtype == ScalarType::Byte) p.exponents[k] = exponents_of(op, name, moment, row);
  }
  p.master = piece(block.master);
  if (p.master) p.master_kind = master_kind(block.master.dtype);
  p.shadow = piece(block.shadow);
  p.shadow_dtype = block.shadow_dtype;
  p.ema = static_cast<float*>(piece(block.ema));
  p.group = static_cast<int>(row.group);
  p.stochastic = (call.flags[static_cast<size_t>(row.group)] & kStochastic) != 0;
  p.random = place_of(op, place, row);
  AK_CHECK(!p.master || is_half(dtype), op, ": ", name, " is ", dtype_name(dtype),
           " and its block has masters; accepted: float16, bfloat16");
  AK_CHECK(!p.shadow || (dtype == ScalarType::Float && is_half(block.shadow.dtype)), op, ": ", name, " is ",
           dtype_name(dtype), " and its block has ", dtype_name(block.shadow.dtype),
           " shadows; accepted: float16 or bfloat16 shadows of float32 params");
  return p;
}

inline void check_row(const char* op, const TableRow& row, int64_t i) {
  const ArgName param{"params", i}, grad{"grads", i};
  table_address(op, param, row.param, row.numel, table_dtype(op, param, row.param_dtype, kParamDtypes));
  table_address(op, grad, row.grad, row.numel, table_dtype(op, grad, row.grad_dtype, kParamDtypes));
  int64_t matrix;  // no division for a tensor of one matrix: this runs for each parameter in each step
  const bool fits = row.rows > 0 && row.columns > 0 && !__builtin_mul_overflow(row.rows, row.columns, &matrix) &&
                    (matrix == row.numel || row.numel % matrix == 0);
  AK_CHECK(fits || row.numel == 0, op, ": ", param, " has ", row.numel, " elements and matrices of ", row.rows, " by ",
           row.columns);
}

// A parameter and a gradient of the lists and their row of the layout, as a row of a table.
inline TableRow checked_row(const char* op, const Tensor& param, const Tensor& grad, const int64_t* place, int64_t i) {
  const ArgName p{"params", i}, g{"grads", i};
  check_dtype(op, p, param, kParamDtypes);
  check_dtype(op, g, grad, kParamDtypes);
  check_dense(op, p, param);
  AK_CHECK(same_layout(param, grad), op, ": ", g, " has shape ", Ints{grad.sizes()}, " and strides ",
           Ints{grad.strides()}, ", ", p, " has shape ", Ints{param.sizes()}, " and strides ", Ints{param.strides()},
           "; they must be the same");
  const int64_t dims = param.dim();
  const auto address = [](const void* data) { return reinterpret_cast<int64_t>(data); };
  return {address(param.mutable_data_ptr()),
          address(grad.const_data_ptr()),
          param.numel(),
          static_cast<int64_t>(param.scalar_type()),
          static_cast<int64_t>(grad.scalar_type()),
          place[0],
          place[1],
          place[2],
          place[3],
          place[4],
          place[5],
          place[6],
          dims < 2 ? 1 : param.size(dims - 2),
          dims < 1 ? 1 : param.size(dims - 1)};
}

template <typename CheckPlace, typename Visit>
void for_each_row(const UpdateCall& call, const CheckPlace& check_place, const Visit& visit) {
  const char* const op = call.op();
  int64_t i = 0;
  if (call.variant.table) {
    for (const TableRow& row : table_rows(op, {"table"}, *call.table)) {
      check_row(op, row, i++);
      visit(row);
    }
    return;
  }
  const int64_t count = call.tensors();
  const Tensor& layout = *call.layout;
  AK_CHECK(call.grads.size() == call.params.size(), op, ": there are ", count, " params and ", call.grads.size(),
           " grads");
  check_dtype(op, {"layout"}, layout, {ScalarType::Long});
  AK_CHECK(layout.is_cpu(), op, ": layout must be on the CPU");
  AK_CHECK(layout.dim() == 2 && layout.size(0) == count && layout.size(1) == 7 && layout.is_contiguous(), op,
           ": layout must be contiguous with shape (", count, ", 7); got shape ", Ints{layout.sizes()});
  const int64_t* place = static_cast<const int64_t*>(layout.const_data_ptr());
  for (; i < count; ++i, place += 7) {
    const Tensor &param = call.params[static_cast<size_t>(i)], &grad = call.grads[static_cast<size_t>(i)];
    check_place({"params", i}, param);
    check_place({"grads", i}, grad);
    visit(checked_row(op, param, grad, place, i));
  }
}

template <typename CheckPlace>
void check_buffers(const UpdateCall& call, const CheckPlace& check_place, const char* name, const TensorList& buffers,
                   size_t per_block, std::initializer_list<ScalarType> dtypes) {
  AK_CHECK(buffers.size() == per_block * call.steps.size(), call.op(), ": ", name, " has ", buffers.size(),
           " entries and steps ", call.steps.size(), "; accepted: ", per_block, " per block");
  for (size_t b = 0; b < buffers.size(); ++b) {
    const ArgName arg{name, static_cast<int64_t>(b)};
    check_dtype(call.op(), arg, buffers[b], dtypes);
    check_place(arg, buffers[b]);
    AK_CHECK(buffers[b].is_contiguous(), call.op(), ": ", arg, " must be contiguous");
  }
}

template <typename Rule, typename CheckPlace>
void check_numbers(const UpdateCall& call, const CheckPlace& check_place) {
  const auto check_groups = [&](const char* name, size_t size, size_t per_group) {
    AK_CHECK(size == per_group * call.flags.size(), call.op(), ": ", name, " has ", size, " entries and flags ",
             call.flags.size(), "; accepted: ", per_group, " per param group");
  };
  const auto check_scalar = [&](ArgName name, const Tensor& scalar, ScalarType dtype = ScalarType::Float) {
    check_one_element(call.op(), name, scalar, dtype);
    check_place(name, scalar);
  };
  const auto check_scalars = [&](const char* name, const TensorList& scalars, ScalarType dtype) {
    if (!scalars.empty()) check_groups(name, scalars.size(), 1);
    for (size_t i = 0; i < scalars.size(); ++i) check_scalar({name, static_cast<int64_t>(i)}, scalars[i], dtype);
  };
  check_groups("options", call.options.size(), Rule::kOptions);
  check_groups("ema_decay", call.ema_decay.size(), 1);
  check_scalars("lrs", call.lrs, ScalarType::Float);
  check_scalars("weight_decays", call.weight_decays, ScalarType::Double);
  if (call.grad_scale) check_scalar({"grad_scale"}, *call.grad_scale);
  if (call.found_inf) check_scalar({"found_inf"}, *call.found_inf);
  if (call.sum_sq) check_scalar({"sum_sq"}, *call.sum_sq);
  if (call.factors) {
    const int64_t count = call.tensors();
    check_dtype(call.op(), {"factors"}, *call.factors, {ScalarType::Float});
    check_place({"factors"}, *call.factors);
    AK_CHECK(!call.sum_sq && call.factors->numel() == count && call.factors->is_contiguous(), call.op(),
             ": factors must be contiguous with one number per param, ", count, ", and no sum_sq; got shape ",
             Ints{call.factors->sizes()});
  }
}

template <typename CheckPlace>
void check_squares(const UpdateCall& call, const CheckPlace& check_place) {
  const Tensor& squares = *call.squares;
  const int64_t count = call.tensors();
  check_dtype(call.op(), {"squares"}, squares, {ScalarType::Double});
  check_place({"squares"}, squares);
  AK_CHECK(squares.dim() == 2 && squares.size(0) == count && squares.size(1) == 2 && squares.is_contiguous(), call.op(),
           ": squares must be contiguous with shape (", count, ", 2); got shape ", Ints{squares.sizes()});
  AK_CHECK(reinterpret_cast<uintptr_t>(squares.const_data_ptr()) % 16 == 0, call.op(),
           ": squares must begin at a multiple of 16 bytes, as its rows are read");
}

}  // namespace detail

// The parameters with their state. Raises unless every access of the update is inside its tensor; changes nothing.
// `check_place(name, tensor)` raises if the kernel cannot reach the tensor; layout and table are read by the host.
template <typename Rule, typename CheckPlace>
std::vector<Param> checked_params(const UpdateCall& call, const CheckPlace& check_place) {
  static_assert(Rule::kMoments <= kMaxMoments);
  const auto check_buffers = [&](const char* name, const TensorList& buffers, size_t per_block,
                                 std::initializer_list<ScalarType> dtypes) {
    detail::check_buffers(call, check_place, name, buffers, per_block, dtypes);
  };
  check_buffers("steps", call.steps, 1, {ScalarType::Float});
  check_buffers("moments", call.moments, Rule::kMoments, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Byte});
  check_buffers("masters", call.masters, 1, {ScalarType::Float, ScalarType::Short, ScalarType::Char});
  check_buffers("shadows", call.shadows, 1, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  check_buffers("emas", call.emas, 1, {ScalarType::Float});
  detail::check_numbers<Rule>(call, check_place);

  if (call.squares) detail::check_squares(call, check_place);
  const std::vector<detail::Block> blocks = detail::blocks_of<Rule>(call);
  std::vector<Param> result;
  result.reserve(static_cast<size_t>(call.tensors()));
  detail::for_each_row(call, check_place, [&](const TableRow& row) {
    result.push_back(detail::param_of<Rule>(call, blocks, row, static_cast<int64_t>(result.size())));
  });
  return result;
}

}  // namespace ak
