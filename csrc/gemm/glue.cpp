// gemm, gemm_dact, gemm_accumulate_, those of an A in segments, and syrk: from the schema to gemm/call.h.
//
// An operand whose rows or columns are contiguous is passed on as it is laid out; any other is copied once.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "activation/name.h"
#include "base/op_call.h"
#include "gemm/call.h"
#include "gemm/column_sums.h"
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
  GemmProblem problem{};
  std::vector<Tensor> copies;  // alive until the kernel of the CPU has run

  Call(const char* name, const Tensor& a_in, const Tensor& b_in, bool batch_invariant)
      : Call(name, checked(name, a_in, b_in), b_in, a_in.size(a_in.dim() - 2), a_in.size(a_in.dim() - 1),
             batch_invariant) {}

  // An m x k operand whose first part is `a_in`.
  Call(const char* name, const Tensor& a_in, const Tensor& b_in, int64_t m, int64_t k, bool batch_invariant)
      : op(name), target(name, {"a"}, a_in), a(a_in, a_in.dim() - 1), b(b_in, b_in.dim() - 2) {
    target.check_place({"b"}, b_in);
    const int64_t d = a_in.dim();
    problem.type = dtype_of(a_in.scalar_type());
    problem.m = as_int(op, m);
    problem.n = as_int(op, b_in.size(d - 1));
    problem.k = as_int(op, k);
    problem.batch = d == 3 ? as_int(op, a_in.size(0)) : 1;
    problem.batch_invariant = batch_invariant;
  }

  static const Tensor& checked(const char* op, const Tensor& a, const Tensor& b) {
    check_dtype(op, {"a"}, a, {ScalarType::Half, ScalarType::BFloat16});
    check_dtype(op, {"b"}, b, {a.scalar_type()});
    const int64_t d = a.dim();
    AK_CHECK((d == 2 || d == 3) && b.dim() == d && a.size(d - 1) == b.size(d - 2) && (d == 2 || a.size(0) == b.size(0)),
             op, ": a and b must have shapes (M, K) and (K, N), or (B, M, K) and (B, K, N); got ", Ints{a.sizes()},
             " and ", Ints{b.sizes()});
    return a;
  }

  // [.., M, columns]
  std::vector<int64_t> sizes(int64_t columns) const {
    std::vector<int64_t> sizes(a.tensor.sizes().begin(), a.tensor.sizes().end());
    *(sizes.end() - 2) = problem.m;
    sizes.back() = columns;
    return sizes;
  }
  void check_sizes(const char* name, const Tensor& t, const std::vector<int64_t>& sizes) const {
    AK_CHECK(static_cast<size_t>(t.dim()) == sizes.size() && std::equal(sizes.begin(), sizes.end(), t.sizes().begin()),
             op, ": ", name, " must have shape ", Ints{sizes}, "; got ", Ints{t.sizes()});
  }
  ScalarType output_dtype(std::optional<ScalarType> out_dtype) const {
    const ScalarType type = out_dtype.value_or(a.tensor.scalar_type());
    AK_CHECK(is_half(type) || type == ScalarType::Float, op, ": out_dtype must be float16, bfloat16 or float32; got ",
             dtype_name(type));
    return type;
  }
  // A tensor that the epilogue reads, in the dtype of a or fp32.
  void check_input(const char* name, const Tensor& t, const std::vector<int64_t>& sizes) const {
    check_dtype(op, {name}, t, {a.tensor.scalar_type(), ScalarType::Float});
    target.check_place({name}, t);
    check_sizes(name, t, sizes);
  }
  GemmValues read(const char* name, const Tensor& t) {
    const bool copied = OpCall::kOnCpu && !t.is_contiguous();
    const Tensor& read = copied ? copies.emplace_back(torch::stable::contiguous(t)) : t;
    return values_of(read, const_cast<void*>(target.read({name}, read)));
  }
  GemmValues bias(const Tensor& t) {
    check_dtype(op, {"bias"}, t, {a.tensor.scalar_type(), ScalarType::Float});
    const bool per_column = t.dim() == 1 && t.size(0) == problem.n;
    AK_CHECK(per_column || (t.dim() == 2 && t.size(0) == problem.m && t.size(1) == 1), op, ": bias must have shape (",
             problem.n, ",) or (", problem.m, ", 1); got ", Ints{t.sizes()});
    GemmValues values{const_cast<void*>(target.read({"bias"}, t)), dtype_of(t.scalar_type())};
    values.row_stride = per_column ? 0 : t.stride(0);
    values.column_stride = per_column ? t.stride(0) : 0;
    return values;
  }

  bool empty() const { return problem.m == 0 || problem.n == 0 || problem.batch == 0; }

  void set_operands() {
    problem.a = target.read({"a"}, a.tensor), problem.b = target.read({"b"}, b.tensor);
    problem.ld_a = a.layout.ld, problem.ld_b = b.layout.ld;
    problem.m_major_a = !a.layout.k_contiguous, problem.n_major_b = !b.layout.k_contiguous;
    problem.batch_stride_a = batch_stride_of(a.tensor), problem.batch_stride_b = batch_stride_of(b.tensor);
  }

  // Runs the problem into problem.c. Not for empty results.
  void run() {
    set_operands();
#ifdef AK_ON_CPU
    target.launch(gemm_cpu, problem);
#else
    GemmLaunch(target).run(problem, gemm_tuning(a.tensor));
#endif
  }
};

// A call whose A is several matrices, side by side or with dim 0 one below the other.
struct SegmentedCall : Call {
  const TensorList& segments;
  int64_t dim;

  SegmentedCall(const char* name, const TensorList& a_in, const Tensor& b_in, int64_t along)
      : SegmentedCall(name, a_in, b_in, along, checked_extent(name, a_in, b_in, along)) {}

  // As Call::run(). A is concatenated if the planned kernel does not read it as it is laid out.
  void run() {
#ifndef AK_ON_CPU
    if (lies_in_segments() && GemmLaunch(target).run_segments(problem, gemm_tuning(b.tensor))) return;
    for (GemmSegment& s : problem.more_a) s = {};
#endif
    a = TensorOperand(joined(), 1);
    Call::run();
  }

 private:
  SegmentedCall(const char* name, const TensorList& a_in, const Tensor& b_in, int64_t along, int64_t extent)
      : Call(name, a_in[0], b_in, along == 0 ? extent : a_in[0].size(0), along == 0 ? a_in[0].size(1) : extent, false),
        segments(a_in),
        dim(along) {}

  // The rows or columns of all of A.
  static int64_t checked_extent(const char* op, const TensorList& a, const Tensor& b, int64_t dim) {
    AK_CHECK(dim == 0 || dim == 1, op, ": dim is ", dim, "; accepted: 0 or 1");
    AK_CHECK(!a.empty(), op, ": a is empty; accepted: at least one matrix");
    check_dtype(op, {"b"}, b, {ScalarType::Half, ScalarType::BFloat16});
    int64_t extent = 0;
    for (size_t i = 0; i < a.size(); i++) {
      const ArgName name{"a", static_cast<int64_t>(i)};
      check_dtype(op, name, a[i], {b.scalar_type()});
      AK_CHECK(a[i].dim() == 2 && a[i].size(1 - dim) == a[0].size(1 - dim), op, ": ", name,
               " must be a matrix with as many ", dim == 0 ? "columns" : "rows", " as a[0]; got shapes ",
               Ints{a[i].sizes()}, " and ", Ints{a[0].sizes()});
      extent += a[i].size(dim);
    }
    const int64_t k = dim == 0 ? a[0].size(1) : extent;
    AK_CHECK(b.dim() == 2 && b.size(0) == k, op, ": b must have shape (", k, ", N); got ", Ints{b.sizes()});
    return extent;
  }

  // Sets the operands as they are laid out. False if gemm_sm90 has no way to say so.
  bool lies_in_segments() {
    const size_t count = segments.size();
    if (count < 2 || count - 1 > std::size(problem.more_a)) return false;
    set_operands();
    int64_t begin = 0;
    for (size_t i = 0; i < count; i++) {
      const Tensor& t = segments[i];
      const int64_t ld = t.stride(1 - dim);
      if (t.size(dim) == 0 || t.stride(dim) != 1 || t.size(1 - dim) == 1 || ld < t.size(dim)) return false;
      const void* const data = target.read({"a", static_cast<int64_t>(i)}, t);
      if (i == 0) {
        problem.a = data, problem.ld_a = ld;
      } else {
        problem.more_a[i - 1] = {data, static_cast<int>(begin), ld};
      }
      begin += t.size(dim);
    }
    return true;
  }

  // Contiguous in `dim`.
  Tensor joined() const {
    const int64_t extent = dim == 0 ? problem.m : problem.k;
    const Tensor lines = torch::stable::new_empty(segments[0], {segments[0].size(1 - dim), extent});
    Tensor whole = dim == 1 ? lines : torch::stable::transpose(lines, 0, 1);
    int64_t begin = 0;
    for (const Tensor& segment : segments) {
      Tensor to = torch::stable::narrow(whole, dim, begin, segment.size(dim));
      torch::stable::copy_(to, segment);
      begin += segment.size(dim);
    }
    return whole;
  }
};

// `z` is undefined unless it is asked for.
std::tuple<Tensor, Tensor> run_gemm(const Tensor& a, const Tensor& b, std::optional<Tensor> bias,
                                    std::optional<Tensor> residual, double alpha, double beta, std::string activation,
                                    std::optional<ScalarType> out_dtype, bool batch_invariant, bool preact) {
  constexpr const char* op = "gemm";
  Call call(op, a, b, batch_invariant);
  const ScalarType type = call.output_dtype(out_dtype);
  GemmEpilogue& e = call.problem.epilogue;
  e.activation = activation_named(op, activation);
  e.alpha = static_cast<float>(alpha);
  e.beta = static_cast<float>(beta);
  const int64_t n = call.problem.n;
  AK_CHECK(!is_gated(e.activation) || n % 2 == 0, op, ": b must have an even number of columns with '", activation,
           "'; got ", n);
  const std::vector<int64_t> sizes = call.sizes(is_gated(e.activation) ? n / 2 : n);
  if (bias) e.bias = call.bias(*bias);
  if (residual) {
    call.check_input("residual", *residual, sizes);
    if (beta != 0) e.residual = call.read("residual", *residual);
  }
  const Tensor out = call.target.empty({"out"}, sizes, type);
  Tensor z;
  if (preact) {
    z = call.target.empty({"preact"}, call.sizes(n), type);
    if (z.numel() > 0) e.z = values_of(z, z.mutable_data_ptr());
  }
  call.problem.c = values_of(out, out.mutable_data_ptr());
  if (!call.empty()) call.run();
  return {out, z};
}

std::tuple<Tensor, Tensor> run_gemm_dact(const Tensor& a, const Tensor& b, const Tensor& preact, std::string activation,
                                         bool bias_grad, std::optional<ScalarType> out_dtype, bool batch_invariant) {
  constexpr const char* op = "gemm_dact";
  Call call(op, a, b, batch_invariant);
  const ScalarType type = call.output_dtype(out_dtype);
  GemmEpilogue& e = call.problem.epilogue;
  e.activation = activation_named(op, activation);
  const int64_t columns = static_cast<int64_t>(call.problem.n) * (is_gated(e.activation) ? 2 : 1);
  const std::vector<int64_t> sizes = call.sizes(columns);
  call.check_input("preact", preact, sizes);
  const Tensor dz = call.target.empty({"dz"}, sizes, type);
  Tensor sums;
  if (bias_grad) sums = call.target.empty({"sums"}, {columns}, ScalarType::Float);
  if (call.empty()) {  // sums over no rows
    if (bias_grad) call.target.zero(sums, static_cast<size_t>(columns) * 4);
    return {dz, sums};
  }
  e.preact = call.read("preact", preact);
  call.problem.c = values_of(dz, dz.mutable_data_ptr());
  if (bias_grad)
    e.column_sums = static_cast<float*>(call.target.scratch(static_cast<size_t>(column_sums_size(call.problem)) * 4));
  call.run();
  if (bias_grad) call.target.launch(gemm_column_sums, call.problem, static_cast<float*>(sums.mutable_data_ptr()));
  return {dz, sums};
}

Tensor run_segmented_gemm(TensorList a, const Tensor& b, int64_t dim, std::optional<ScalarType> out_dtype) {
  SegmentedCall call("segmented_gemm", a, b, dim);
  const Tensor out = call.target.empty({"out"}, call.sizes(call.problem.n), call.output_dtype(out_dtype));
  call.problem.c = values_of(out, out.mutable_data_ptr());
  if (!call.empty()) call.run();
  return out;
}

void run_segmented_accumulate(const Tensor& c, TensorList a, const Tensor& b, bool overwrite) {
  SegmentedCall call("segmented_gemm_accumulate_", a, b, 0);
  check_dtype(call.op, {"c"}, c, {ScalarType::Float});
  call.target.check_place({"c"}, c);
  call.check_sizes("c", c, call.sizes(call.problem.n));
  if (call.empty()) return;
  call.problem.c = values_of(c, call.target.write({"c"}, c, !overwrite));
  call.problem.accumulate = !overwrite;
  call.run();
}

void run_gemm_accumulate(const Tensor& c, const Tensor& a, const Tensor& b, double alpha, double beta,
                         bool batch_invariant) {
  constexpr const char* op = "gemm_accumulate_";
  Call call(op, a, b, batch_invariant);
  check_dtype(op, {"c"}, c, {ScalarType::Float});
  call.target.check_place({"c"}, c);
  call.check_sizes("c", c, call.sizes(call.problem.n));
  if (call.empty()) return;
  GemmEpilogue& e = call.problem.epilogue;
  e.alpha = static_cast<float>(alpha);
  call.problem.c = values_of(c, call.target.write({"c"}, c, beta != 0.0));
  call.problem.accumulate = beta == 1.0;
  if (beta != 0.0 && beta != 1.0) {
    e.beta = static_cast<float>(beta);
    e.residual = call.problem.c;
  }
#ifndef AK_ON_CPU
  if (is_chained(call.problem)) {
    if (call.problem.k == 0) return;
    const int64_t d = call.a.tensor.dim();
    call.a.lay_across(d - 1);
    call.b.lay_across(d - 2);
  }
#endif
  call.run();
}

// True if kernels may read pairs of elements of a row, from every even column on.
bool has_pairs(const Tensor& t) {
  const int64_t d = t.dim(), distances = t.stride(d - 2) | batch_stride_of(t);
  return t.size(d - 1) % 2 == 0 && t.stride(d - 1) == 1 && distances % 2 == 0 &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 4 == 0;
}

// The lower triangle of alpha a b' + beta c + diagonal I, and its mirror image. On a GPU rows of C begin at multiples
// of 16 bytes, and C is copied if that leaves gaps.
Tensor run_syrk(const Tensor& a, const Tensor& b, std::optional<Tensor> c, double alpha, double beta, double diagonal) {
  constexpr const char* op = "syrk";
  AK_CHECK(a.dim() == 2 || a.dim() == 3, op, ": a must have shape (N, K) or (B, N, K); got ", Ints{a.sizes()});
  AK_CHECK(same_sizes(a, b), op, ": b must have the shape of a, ", Ints{a.sizes()}, "; got ", Ints{b.sizes()});
  Call call(op, a, torch::stable::transpose(b, -2, -1), false);
  if (call.a.layout.k_contiguous != call.b.layout.k_contiguous) {
    const int64_t d = a.dim();
    call.a = TensorOperand(torch::stable::contiguous(a), d - 1);
    call.b = TensorOperand(torch::stable::transpose(torch::stable::contiguous(b), -2, -1), d - 2);
  }
  call.problem.symmetric = true;
  GemmEpilogue& e = call.problem.epilogue;
  e.alpha = static_cast<float>(alpha), e.beta = static_cast<float>(beta), e.diagonal = static_cast<float>(diagonal);
  const int64_t n = call.problem.n, pitch = OpCall::kOnCpu ? n : (n + 7) / 8 * 8;
  const std::vector<int64_t> sizes = call.sizes(n), padded = call.sizes(pitch);
  Tensor copies;  // alive until the launch
  if (c) {
    check_dtype(op, {"c"}, *c, {a.scalar_type()});
    call.target.check_place({"c"}, *c);
    call.check_sizes("c", *c, sizes);
    if (beta != 0 && !call.empty()) {
      Tensor pairs = *c, span = *c;
      if (!OpCall::kOnCpu && !has_pairs(*c)) {
        span = torch::stable::new_zeros(*c, padded);
        pairs = torch::stable::narrow(span, -1, 0, n);
        torch::stable::copy_(pairs, *c);
        copies = span;
      }
      e.residual = call.read("c", span);
    }
  }
  Tensor room = call.target.empty({"out"}, padded, a.scalar_type());
  if (call.empty()) return pitch == n ? room : call.target.empty({"out"}, sizes, a.scalar_type());
  call.problem.c = values_of(room, room.mutable_data_ptr());
  call.run();
  return pitch == n ? room : torch::stable::contiguous(torch::stable::narrow(room, -1, 0, n));
}

#ifndef AK_ON_CPU
// Plan {kernel, tile, splits, swapped} of a product, whose fields are those of GemmKey in order, activation apart.
// Without a plan the planner decides again.
void set_gemm_plan(const Tensor& on, std::vector<int64_t> product, std::string activation, std::vector<int64_t> plan) {
  constexpr const char* op = "_set_gemm_plan";
  AK_CHECK(product.size() == 12 && (plan.empty() || plan.size() == 4), op,
           ": product must have 12 numbers and plan 4 or none; got ", product.size(), " and ", plan.size());
  const std::vector<int64_t>& p = product;
  const GemmKey key{.m = as_int(op, p[0]),
                    .n = as_int(op, p[1]),
                    .k = as_int(op, p[2]),
                    .batch = as_int(op, p[3]),
                    .m_major_a = p[4] != 0,
                    .n_major_b = p[5] != 0,
                    .out_bytes = as_int(op, p[6]),
                    .activation = activation_named(op, activation),
                    .bias = p[7] != 0,
                    .residual = p[8] != 0,
                    .keeps_z = p[9] != 0,
                    .backward = p[10] != 0,
                    .column_sums = p[11] != 0};
  std::map<GemmKey, GemmChoice>& plans = gemm_tuning(on).plans;
  plans.erase(key);
  if (plan.empty()) return;
  plans[key] = {static_cast<GemmKernel>(plan[0]), as_int(op, plan[1]), as_int(op, plan[2]), plan[3] != 0};
}
#endif

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("gemm", TORCH_BOX(&ak::run_gemm));
  m.impl("gemm_dact", TORCH_BOX(&ak::run_gemm_dact));
  m.impl("gemm_accumulate_", TORCH_BOX(&ak::run_gemm_accumulate));
  m.impl("segmented_gemm", TORCH_BOX(&ak::run_segmented_gemm));
  m.impl("segmented_gemm_accumulate_", TORCH_BOX(&ak::run_segmented_accumulate));
  m.impl("syrk", TORCH_BOX(&ak::run_syrk));
#ifndef AK_ON_CPU
  m.impl("_set_gemm_plan", TORCH_BOX(&ak::set_gemm_plan));
#endif
}
