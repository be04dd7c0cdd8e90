// grouped_gemm and grouped_gemm_accumulate_: from the schema to GroupedProblem.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activation/name.h"
#include "base/op_call.h"
#include "gemm/call.h"
#include "gemm/glue_operand.h"
#ifndef AK_ON_CPU
#include "gemm/launch.h"
#endif

namespace ak {
namespace {

// One call: its operands, and the problem that they make.
struct Call {
  const char* op;
  OpCall target;
  TensorOperand a, b;
  GroupedProblem grouped{};

  Call(const char* name, const Tensor& a_in, const Tensor& b_in, const Tensor& offs, bool batch_invariant)
      : op(name), target(name, {"a"}, a_in), a(checked(name, a_in, b_in), 1), b(b_in, b_in.dim() - 2) {
    target.check_place({"b"}, b_in);
    check_dtype(op, {"offs"}, offs, {ScalarType::Int});
    grouped.sums = b_in.dim() == 2;
    AK_CHECK(offs.dim() == 1 && (grouped.sums || offs.size(0) == b_in.size(0)), op,
             ": offs must have one end per group; got shape ", Ints{offs.sizes()});
    grouped.groups = as_int(op, offs.size(0));
    grouped.offs = target.read<int32_t>({"offs"}, offs);
    grouped.offs_stride = offs.stride(0);
    GemmProblem& q = grouped.product;
    q.type = dtype_of(a_in.scalar_type());
    q.m = as_int(op, a_in.size(0)), q.n = as_int(op, b_in.size(b_in.dim() - 1)), q.k = as_int(op, a_in.size(1));
    q.batch_invariant = batch_invariant;
    check_ends(grouped.sums ? q.k : q.m);
  }

  static const Tensor& checked(const char* op, const Tensor& a, const Tensor& b) {
    check_dtype(op, {"a"}, a, {ScalarType::Half, ScalarType::BFloat16});
    check_dtype(op, {"b"}, b, {a.scalar_type()});
    AK_CHECK(a.dim() == 2 && (b.dim() == 2 || b.dim() == 3) && a.size(1) == b.size(b.dim() - 2), op,
             ": a and b must have shapes (T, K) and (G, K, N), or (M, T) and (T, N); got ", Ints{a.sizes()}, " and ",
             Ints{b.sizes()});
    return a;
  }

  void check_ends(int total) const {
    if (!OpCall::kOnCpu) return;  // the kernels clamp them
    int previous = 0;
    for (int group = 0; group < grouped.groups; ++group) {
      const int end = grouped.offs[group * grouped.offs_stride];
      AK_CHECK(previous <= end && end <= total, op, ": offs[", group, "] is ", end,
               "; accepted: ends in ascending order within [0, ", total, "], here from ", previous, " on");
      previous = end;
    }
  }

  GemmValues bias(const Tensor& t) {
    const int64_t n = grouped.product.n;
    check_dtype(op, {"bias"}, t, {a.tensor.scalar_type(), ScalarType::Float});
    const bool shared = t.dim() == 1 && t.size(0) == n;
    AK_CHECK(shared || (t.dim() == 2 && t.size(0) == grouped.groups && t.size(1) == n), op, ": bias must have shape (",
             grouped.groups, ", ", n, ") or (", n, ",); got ", Ints{t.sizes()});
    return {.data = const_cast<void*>(target.read({"bias"}, t)),
            .type = dtype_of(t.scalar_type()),
            .column_stride = t.stride(t.dim() - 1),
            .batch_stride = shared ? 0 : t.stride(0)};
  }

  // Runs the product into grouped.product.c. Not for empty results.
  void run() {
    GemmProblem& q = grouped.product;
#ifndef AK_ON_CPU
    a.lay(1, !grouped.sums);
    if (grouped.sums) b.lay(0, false);
#endif
    q.a = target.read({"a"}, a.tensor), q.b = target.read({"b"}, b.tensor);
    q.ld_a = a.layout.ld, q.ld_b = b.layout.ld;
    q.m_major_a = !a.layout.k_contiguous, q.n_major_b = !b.layout.k_contiguous;
    q.batch_stride_b = batch_stride_of(b.tensor);
#ifdef AK_ON_CPU
    target.launch(grouped_gemm_cpu, grouped);
#else
    GroupedLaunch(target).run(grouped);
#endif
  }
};

// `z` is undefined unless it is asked for.
std::tuple<Tensor, Tensor> run_grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& offs,
                                            std::optional<Tensor> bias, std::string activation,
                                            std::optional<ScalarType> out_dtype, bool batch_invariant, bool preact) {
  constexpr const char* op = "grouped_gemm";
  Call call(op, a, b, offs, batch_invariant);
  const ScalarType type = out_dtype.value_or(a.scalar_type());
  AK_CHECK(is_half(type) || type == ScalarType::Float, op, ": out_dtype must be float16, bfloat16 or float32; got ",
           dtype_name(type));
  GemmProblem& q = call.grouped.product;
  GemmEpilogue& e = q.epilogue;
  e.activation = activation_named(op, activation);
  AK_CHECK(!call.grouped.sums || (!bias && e.activation == Activation::none && !preact), op,
           ": b must have shape (G, K, N) with bias, activation or preact; got ", Ints{b.sizes()});
  AK_CHECK(!is_gated(e.activation) || q.n % 2 == 0, op, ": b must have an even number of columns with '", activation,
           "'; got ", q.n);
  if (bias) e.bias = call.bias(*bias);
  const int64_t columns = is_gated(e.activation) ? q.n / 2 : q.n;
  const std::vector<int64_t> sizes =
      call.grouped.sums ? std::vector<int64_t>{call.grouped.groups, q.m, columns} : std::vector<int64_t>{q.m, columns};
  const Tensor out = call.target.empty({"out"}, sizes, type);
  Tensor z;
  if (preact) {
    z = call.target.empty({"preact"}, {q.m, q.n}, type);
    if (z.numel() > 0) e.z = values_of(z, z.mutable_data_ptr());
  }
  q.c = values_of(out, out.mutable_data_ptr());
  if (call.grouped.groups == 0) {  // every row is past the last end
    call.target.zero(out, static_cast<size_t>(out.numel()) * out.element_size());
    if (preact) call.target.zero(z, static_cast<size_t>(z.numel()) * z.element_size());
  } else if (out.numel() > 0) {
    call.run();
  }
  return {out, z};
}

void run_grouped_accumulate(const Tensor& c, const Tensor& a, const Tensor& b, const Tensor& offs, bool overwrite,
                            bool batch_invariant) {
  constexpr const char* op = "grouped_gemm_accumulate_";
  Call call(op, a, b, offs, batch_invariant);
  const GemmProblem& q = call.grouped.product;
  AK_CHECK(call.grouped.sums, op, ": b must have shape (T, N); got ", Ints{b.sizes()});
  check_dtype(op, {"c"}, c, {ScalarType::Float});
  AK_CHECK(c.dim() == 3 && c.size(0) == call.grouped.groups && c.size(1) == q.m && c.size(2) == q.n, op,
           ": c must have shape (", call.grouped.groups, ", ", q.m, ", ", q.n, "); got ", Ints{c.sizes()});
  if (c.numel() == 0) return;
  call.grouped.product.c = values_of(c, call.target.write({"c"}, c, !overwrite));
  call.grouped.product.accumulate = !overwrite;
  call.run();
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("grouped_gemm", TORCH_BOX(&ak::run_grouped_gemm));
  m.impl("grouped_gemm_accumulate_", TORCH_BOX(&ak::run_grouped_accumulate));
}
