// softmax_rows and softmax_rows_backward on a GPU: checks, outputs, launch of softmax/rows.cu.
#include "softmax/rows.h"

#include "base/gpu/call.h"
#include "softmax/arguments.h"

namespace ak {
namespace {

constexpr int64_t kMaxSoftmaxColumns = int64_t{1} << 30;

RowMask row_mask(GpuCall& call, const std::optional<Tensor>& mask) {
  if (!mask || mask->numel() == 0) return {};
  const auto* data = static_cast<const uint8_t*>(call.read({"mask"}, *mask));
  const int64_t offsets = reinterpret_cast<int64_t>(data) | mask->stride(0) | mask->stride(1) | mask->stride(2);
  return {data,
          {mask->size(1), mask->size(2)},
          {mask->stride(0), mask->stride(1), mask->stride(2)},
          (offsets | mask->size(3)) % 8 == 0};
}

int columns_of(const char* op, const Tensor& t) {
  AK_CHECK(t.size(1) <= kMaxSoftmaxColumns, op, ": at most ", kMaxSoftmaxColumns, " columns; got ", t.size(1));
  return static_cast<int>(t.size(1));
}

std::tuple<Tensor, Tensor> run_softmax_rows(const Tensor& x, const std::optional<Tensor> mask, bool log, bool safe,
                                            ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows";
  GpuCall call(op, {"x"}, x);
  check_softmax_matrix(op, {"x"}, x);
  check_softmax_mask(op, mask, x);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  SoftmaxRows p{};
  p.rows = x.size(0);
  p.columns = columns_of(op, x);
  const Tensor y = call.empty({"y"}, {p.rows, x.size(1)}, out_dtype);
  const Tensor statistics = call.empty({"statistics"}, {2, log ? p.rows : 0}, ScalarType::Float);
  p.x = call.read({"x"}, x);
  p.y = y.mutable_data_ptr();
  p.statistics = log ? static_cast<float*>(statistics.mutable_data_ptr()) : nullptr;
  p.mask = row_mask(call, mask);
  p.x_type = dtype_of(x.scalar_type());
  p.y_type = dtype_of(out_dtype);
  p.safe = safe;
  call.launch(softmax_rows, p);
  return {y, statistics};
}

Tensor run_softmax_rows_backward(const Tensor& grad, const Tensor& of, const std::optional<Tensor> statistics,
                                 const std::optional<Tensor> mask, ScalarType out_dtype) {
  constexpr const char* op = "softmax_rows_backward";
  GpuCall call(op, {"grad"}, grad);
  check_softmax_gradient(op, grad, of, statistics, mask);
  check_dtype(op, {"out_dtype"}, out_dtype, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  SoftmaxGradient p{};
  p.rows = grad.size(0);
  p.columns = columns_of(op, grad);
  const Tensor out = call.empty({"out"}, {p.rows, grad.size(1)}, out_dtype);
  p.grad = call.read({"grad"}, grad);
  p.of = call.read({"of"}, of);
  if (statistics) p.statistics = static_cast<const float*>(call.read({"statistics"}, *statistics));
  p.mask = row_mask(call, mask);
  p.out = out.mutable_data_ptr();
  p.grad_type = dtype_of(grad.scalar_type());
  p.of_type = dtype_of(of.scalar_type());
  p.out_type = dtype_of(out_dtype);
  call.launch(softmax_rows_backward, p);
  return out;
}

}  // namespace
}  // namespace ak

AK_GPU_OPS(m) {
  m.impl("softmax_rows", TORCH_BOX(&ak::run_softmax_rows));
  m.impl("softmax_rows_backward", TORCH_BOX(&ak::run_softmax_rows_backward));
}
