// softmax_rows and softmax_rows_backward: from the schema to softmax/call.h.
#include "base/op_call.h"
#include "softmax/call.h"

namespace ak {
namespace {

int check_matrix(const char* op, ArgName name, const Tensor& t) {
  check_dtype(op, name, t, kNarrowDtypes);
  AK_CHECK(t.dim() == 2 && t.size(1) > 0 && t.is_contiguous(), op, ": ", name,
           " must be contiguous with shape (rows, columns), columns > 0; got shape ", Ints{t.sizes()}, " and strides ",
           Ints{t.strides()});
  AK_CHECK(t.size(1) <= kMaxSoftmaxColumns, op, ": at most ", kMaxSoftmaxColumns, " columns; got ", t.size(1));
  return static_cast<int>(t.size(1));
}

// A mask of shape (a, b, c, columns) with a * b * c rows, whose strides are free.
RowMask mask_of(OpCall& call, const std::optional<Tensor>& mask, const Tensor& like) {
  if (!mask) return {};
  check_dtype(call.op(), {"mask"}, *mask, {ScalarType::Bool});
  AK_CHECK(mask->dim() == 4 && mask->size(0) * mask->size(1) * mask->size(2) == like.size(0) &&
               mask->size(3) == like.size(1) && (mask->size(3) == 1 || mask->numel() == 0 || mask->stride(3) == 1),
           call.op(), ": mask must have shape (a, b, c, ", like.size(1), ") with a * b * c = ", like.size(0),
           " and adjacent columns; got shape ", Ints{mask->sizes()}, " and strides ", Ints{mask->strides()});
  if (mask->numel() == 0) return {};
  const auto* data = call.read<uint8_t>({"mask"}, mask);
  const int64_t offsets = reinterpret_cast<int64_t>(data) | mask->stride(0) | mask->stride(1) | mask->stride(2);
  return {data,
          {mask->size(1), mask->size(2)},
          {mask->stride(0), mask->stride(1), mask->stride(2)},
          (offsets | mask->size(3)) % 8 == 0};
}

std::tuple<Tensor, Tensor> run_softmax_rows(const Tensor& x, const std::optional<Tensor> mask, bool log, bool safe,
                                            ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows";
  OpCall call(op, {"x"}, x);
  const int columns = check_matrix(op, {"x"}, x);
  const RowMask row_mask = mask_of(call, mask, x);
  check_dtype(op, {"out_dtype"}, out_dtype, kNarrowDtypes);
  const int64_t rows = x.size(0);
  const Tensor y = call.empty({"y"}, {rows, columns}, out_dtype);
  const Tensor statistics = call.empty({"statistics"}, {2, log ? rows : 0}, ScalarType::Float);
  const SoftmaxRows p{.x = call.read({"x"}, x),
                      .y = y.mutable_data_ptr(),
                      .statistics = log ? static_cast<float*>(statistics.mutable_data_ptr()) : nullptr,
                      .mask = row_mask,
                      .x_type = dtype_of(x.scalar_type()),
                      .y_type = dtype_of(out_dtype),
                      .rows = rows,
                      .columns = columns,
                      .safe = safe};
  call.launch(softmax_rows, p);
  return {y, statistics};
}

Tensor run_softmax_rows_backward(const Tensor& grad, const Tensor& of, const std::optional<Tensor> statistics,
                                 const std::optional<Tensor> mask, ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows_backward";
  OpCall call(op, {"grad"}, grad);
  const int columns = check_matrix(op, {"grad"}, grad);
  check_matrix(op, {"of"}, of);
  AK_CHECK(same_sizes(grad, of), op, ": of must have the shape of grad, ", Ints{grad.sizes()}, "; got ",
           Ints{of.sizes()});
  const RowMask row_mask = mask_of(call, mask, grad);
  const int64_t rows = grad.size(0);
  if (statistics) {
    check_dtype(op, {"statistics"}, *statistics, {ScalarType::Float});
    AK_CHECK(statistics->dim() == 2 && statistics->size(0) == 2 && statistics->size(1) == rows &&
                 statistics->is_contiguous(),
             op, ": statistics must be contiguous with shape (2, ", rows, "); got ", Ints{statistics->sizes()});
  }
  check_dtype(op, {"out_dtype"}, out_dtype, kNarrowDtypes);
  const Tensor out = call.empty({"out"}, {rows, columns}, out_dtype);
  const SoftmaxRowsBackward p{.grad = call.read({"grad"}, grad),
                              .of = call.read({"of"}, of),
                              .statistics = call.read<float>({"statistics"}, statistics),
                              .mask = row_mask,
                              .out = out.mutable_data_ptr(),
                              .grad_type = dtype_of(grad.scalar_type()),
                              .of_type = dtype_of(of.scalar_type()),
                              .out_type = dtype_of(out_dtype),
                              .rows = rows,
                              .columns = columns};
  call.launch(softmax_rows_backward, p);
  return out;
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("softmax_rows", TORCH_BOX(&ak::run_softmax_rows));
  m.impl("softmax_rows_backward", TORCH_BOX(&ak::run_softmax_rows_backward));
}
