// unit_sums_: from the schema to unit_sums/call.h. Matrices with gaps are made contiguous first.
#include "base/op_call.h"
#include "unit_sums/call.h"

namespace ak {
namespace {

void run_unit_sums(Tensor sums, const Tensor& grad_in, const std::optional<Tensor> x_in,
                   const std::optional<Tensor> mean, const std::optional<Tensor> rstd, bool fresh) {
  constexpr const char* op = "unit_sums_";
  OpCall call(op, {"sums"}, sums);
  check_dtype(op, {"sums"}, sums, {ScalarType::Float});
  check_dtype(op, {"grad"}, grad_in, kNarrowDtypes);
  AK_CHECK(grad_in.dim() == 2 && sums.dim() == 1 && sums.size(0) == grad_in.size(1) && sums.is_contiguous(), op,
           ": sums must be contiguous with shape (columns) and grad have shape (rows, columns); got ",
           Ints{sums.sizes()}, " and ", Ints{grad_in.sizes()});
  AK_CHECK(grad_in.size(1) <= INT32_MAX, op, ": grad must have at most ", INT32_MAX, " columns");
  AK_CHECK(x_in.has_value() == rstd.has_value() && (x_in || !mean), op, ": x, rstd and mean go together");
  if (x_in) {
    check_dtype(op, {"x"}, *x_in, kNarrowDtypes);
    AK_CHECK(same_sizes(*x_in, grad_in), op, ": x must have the shape of grad, ", Ints{grad_in.sizes()}, "; got ",
             Ints{x_in->sizes()});
  }
  for (const auto& [name, t] : {std::pair{"mean", &mean}, {"rstd", &rstd}}) {
    if (!*t) continue;
    check_dtype(op, {name}, **t, {ScalarType::Float});
    AK_CHECK((*t)->dim() == 1 && (*t)->size(0) == grad_in.size(0) && (*t)->is_contiguous(), op, ": ", name,
             " must be contiguous with shape (", grad_in.size(0), "); got ", Ints{(*t)->sizes()});
  }
  const Tensor grad = torch::stable::contiguous(grad_in);
  const auto x = x_in ? std::optional(torch::stable::contiguous(*x_in)) : std::nullopt;
  UnitSums p{.sums = static_cast<float*>(call.write({"sums"}, sums, !fresh)),
             .grad = call.read({"grad"}, grad),
             .x = call.read({"x"}, x),
             .mean = call.read<float>({"mean"}, mean),
             .rstd = call.read<float>({"rstd"}, rstd),
             .units = nullptr,
             .grad_type = dtype_of(grad.scalar_type()),
             .x_type = x ? dtype_of(x->scalar_type()) : DType::kFloat32,
             .rows = grad.size(0),
             .columns = static_cast<int>(grad.size(1)),
             .fresh = fresh};
  if (p.columns == 0) return;
  if (!call.kOnCpu) p.units = static_cast<float*>(call.scratch(static_cast<size_t>(p.unit_count() * p.columns) * 4));
  call.launch(unit_sums, p);
}

}  // namespace
}  // namespace ak

AK_OPS(m) { m.impl("unit_sums_", TORCH_BOX(&ak::run_unit_sums)); }
