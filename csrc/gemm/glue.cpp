// gemm, gemm_dact and gemm_accumulate_ on a GPU: checks, how the operands lie, outputs and scratch from
// torch's allocator, and the launch that csrc/gemm/plan.h chooses.
//
// An operand whose rows or columns are contiguous is taken as it lies; any other is copied once. What does not begin at
// multiples of 16 bytes is multiplied in phases that do, or on Hopper copied for TMA, where the planner finds that
// faster than the kernel that reads anything.
#include "gemm/call.h"

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "activation/formula.h"
#include "activation/name.h"
#include "base/op_call.h"
#include "gemm/column_sums.h"
#include "gemm/operand.h"
#include "gemm/phases.h"
#include "gemm/plan.h"
#include "gemm/sm90/repack.h"

namespace ak {
namespace {

int as_int(const char* op, int64_t size) {
  constexpr int64_t kMost = INT32_MAX - 1023;  // kernels round up to whole tiles
  AK_CHECK(size <= kMost, op, ": a size is ", size, "; accepted: at most ", kMost);
  return static_cast<int>(size);
}

// Rates of the planner's model by GPU: an H200's, until `_set_gemm_rates` says others.
GemmRates& rates_of(const Tensor& on) {
  static std::array<GemmRates, 64> rates;
  return rates[static_cast<size_t>(on.get_device_index()) % rates.size()];
}

GemmChip chip_of(const GpuProperties& gpu, const GemmRates& rates) {
  GemmChip chip{.sm_count = gpu.sm_count, .capability = gpu.capability, .rates = rates};
#ifndef AK_HAS_SM90a
  chip.sm90 = false;
#endif
#ifndef AK_HAS_GEMM_SM80
  chip.sm80 = false;
#endif
  return chip;
}

// Strides of the last two dimensions and of the batch, which has none in two dimensions.
GemmValues values_of(const Tensor& t, void* data) {
  const int64_t d = t.dim();
  return {data, dtype_of(t.scalar_type()), t.stride(d - 2), t.stride(d - 1), d == 3 && t.size(0) > 1 ? t.stride(0) : 0};
}

// How an operand lies: contiguous along k, or along its other dimension.
struct Operand {
  Tensor tensor;  // keeps a copy alive
  const void* data;
  int64_t ld = 0, batch_stride = 0;
  bool k_contiguous = false;

  // `k_dim` is the dimension, of the last two, that is summed over.
  Operand(const Tensor& t, int64_t k_dim) : tensor(t) {
    if (!describe(k_dim)) {
      tensor = torch::stable::contiguous(t);
      describe(k_dim);
    }
  }

  // Whether its lines and matrices begin at multiples of 16 bytes.
  bool aligned() const { return gemm_sm90_reads(data, ld, batch_stride); }

 private:
  bool describe(int64_t k_dim) {
    const int64_t d = tensor.dim(), other = k_dim == d - 1 ? d - 2 : d - 1;
    const auto lies = gemm_operand(tensor.size(k_dim), tensor.stride(k_dim), tensor.size(other), tensor.stride(other));
    data = tensor.const_data_ptr();
    batch_stride = d == 3 && tensor.size(0) > 1 ? tensor.stride(0) : 0;
    if (lies) ld = lies->ld, k_contiguous = lies->k_contiguous;
    return lies.has_value();
  }
};

// One call: its operands, and the problem that they make.
struct Call {
  const char* op;
  OpCall gpu;
  Operand a, b;
  DType half;
  GemmProblem problem{};
  bool batch_invariant;

  Call(const char* name, const Tensor& a_in, const Tensor& b_in, bool invariant)
      : op(name),
        gpu(name, {"a"}, a_in),
        a(checked(name, a_in, b_in), a_in.dim() - 1),
        b(b_in, b_in.dim() - 2),
        half(dtype_of(a_in.scalar_type())),
        batch_invariant(invariant) {
    gpu.check_place({"b"}, b_in);
    const int64_t d = a_in.dim();
    problem.m = as_int(op, a_in.size(d - 2));
    problem.n = as_int(op, b_in.size(d - 1));
    problem.k = as_int(op, a_in.size(d - 1));
    problem.batch = d == 3 ? as_int(op, a_in.size(0)) : 1;
    // Then K alone says which kernel may run (request_of), wherever the rows of A came from.
    if (batch_invariant && problem.k % 8 == 0 && !a.aligned()) {
      const Tensor rows = torch::stable::contiguous(a_in);
      a = Operand(reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 ? rows : torch::stable::clone(rows),
                  d - 1);
    }
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

  // [.., M, columns], contiguous.
  Tensor output(const char* name, int64_t columns, ScalarType dtype) {
    std::vector<int64_t> sizes(a.tensor.sizes().begin(), a.tensor.sizes().end());
    sizes.back() = columns;
    return gpu.empty({name}, sizes, dtype);
  }
  ScalarType output_dtype(std::optional<ScalarType> out_dtype) const {
    const ScalarType type = out_dtype.value_or(a.tensor.scalar_type());
    AK_CHECK(is_half(type) || type == ScalarType::Float, op, ": out_dtype must be float16, bfloat16 or float32; got ",
             dtype_name(type));
    return type;
  }
  GemmValues read(const char* name, const Tensor& t) { return values_of(t, const_cast<void*>(gpu.read({name}, t))); }
  // A tensor that the epilogue reads: the sizes of `like`, the dtype of a or fp32.
  GemmValues beside(const char* name, const Tensor& t, const Tensor& like) {
    check_dtype(op, {name}, t, {a.tensor.scalar_type(), ScalarType::Float});
    AK_CHECK(same_sizes(t, like), op, ": ", name, " must have shape ", Ints{like.sizes()}, "; got ", Ints{t.sizes()});
    return read(name, t);
  }
  GemmValues bias(const Tensor& t) {
    check_dtype(op, {"bias"}, t, {a.tensor.scalar_type(), ScalarType::Float});
    const bool per_column = t.dim() == 1 && t.size(0) == problem.n;
    AK_CHECK(per_column || (t.dim() == 2 && t.size(0) == problem.m && t.size(1) == 1), op, ": bias must have shape (",
             problem.n, ",) or (", problem.m, ", 1); got ", Ints{t.sizes()});
    GemmValues values{const_cast<void*>(gpu.read({"bias"}, t)), dtype_of(t.scalar_type())};
    values.row_stride = per_column ? 0 : t.stride(0);
    values.column_stride = per_column ? t.stride(0) : 0;
    return values;
  }

  bool empty() const { return problem.m == 0 || problem.n == 0 || problem.batch == 0; }

  // Runs the problem into problem.c. Not for empty results.
  void run(GemmOutput output) {
    if (problem.k == 0) sum_over_nothing();
    problem.a = gpu.read({"a"}, a.tensor), problem.b = gpu.read({"b"}, b.tensor);
    problem.ld_a = a.ld, problem.ld_b = b.ld;
    problem.m_major_a = !a.k_contiguous, problem.n_major_b = !b.k_contiguous;
    problem.batch_stride_a = a.batch_stride, problem.batch_stride_b = b.batch_stride;
    const GemmRequest request = request_of(problem, output, half, batch_invariant);
    GemmChip chip = chip_of(gpu.target().properties(), rates_of(a.tensor));
    const auto launched = [&] {
      const GemmPlan plan = plan_gemm_once(request, chip);
      return half == DType::kFloat16 ? launch<fp16>(plan, output) : launch<bf16>(plan, output);
    };
    if (launched()) return;
    chip.sm90 = false;  // the other kernel needs no tensor maps
    launched();
  }

 private:
  // The kernels want a k: 8 zeros give the same sums as none.
  void sum_over_nothing() {
    const int64_t d = a.tensor.dim();
    const auto zeros = [&](const Tensor& t, int64_t k_dim) {
      std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
      sizes[static_cast<size_t>(k_dim)] = 8;
      const Tensor filled = gpu.empty({"zeros"}, sizes, t.scalar_type());
      gpu.zero(filled, static_cast<size_t>(filled.numel()) * 2);
      return Operand(filled, k_dim);
    };
    a = zeros(a.tensor, d - 1);
    b = zeros(b.tensor, d - 2);
    problem.k = 8;
  }

  // For the parts of a split product; lives as long as the call.
  GemmScratch scratch(const GemmScratchSize& size) {
    if (size.partials == 0) return {};
    GemmScratch parts{static_cast<float*>(gpu.scratch(size.partials * 4)), gpu.counters(size.counters)};
    parts.memset = gpu.counters_took_memset();
    return parts;
  }

  // False if gemm_sm90 has no tensor map of an operand; nothing was computed then.
  template <class T>
  bool launch(const GemmPlan& plan, GemmOutput output) {
    const GemmPhases& phases = plan.phases;
    if (phases.count == 0) return product<T>(problem, plan, output);
    auto* const parts = static_cast<float*>(gpu.scratch(static_cast<size_t>(phases.size(problem.m, problem.n)) * 4));
    if (!product<T>(gemm_in_phases(problem, phases, parts), plan, GemmOutput::kFloat32)) return false;
    gpu.launch(gemm_add_phases<T>, problem, phases, parts, output == GemmOutput::kAccumulate);
    return true;
  }

  template <class T>
  bool product([[maybe_unused]] GemmProblem q, [[maybe_unused]] const GemmPlan& plan,
               [[maybe_unused]] GemmOutput output) {
#ifdef AK_HAS_SM90a
    if (plan.kernel == GemmKernel::kSm90) {
      const GemmSm90Config config{plan.tile, plan.splits, plan.swapped};
      if (const size_t bytes = gemm_repack_bytes(q)) {
        const GemmProblem lies = q;
        q = gemm_repacked(lies, gpu.scratch(bytes));
        gpu.launch(gemm_repack, lies, q);
      }
      const Status status = gpu.try_launch(gemm_sm90<T>, q, config, output, scratch(gemm_sm90_scratch(q, config)));
      if (std::string_view(status.message) == kGemmSm90HasNoMap) return false;
      gpu.check(status);
      return true;
    }
#endif
#ifdef AK_HAS_GEMM_SM80
    if (plan.kernel == GemmKernel::kSm80) {
      const GemmSm80Config config{kGemmSm80Tiles[plan.tile], plan.splits, output == GemmOutput::kAccumulate};
      gpu.launch(gemm_sm80<T>, q, config, scratch(gemm_sm80_scratch(q, config)));
      return true;
    }
#endif
    fail(op,
         ": this build has no GEMM kernel for this GPU and these operands; with AMP_KERNELS_BACKEND=triton another "
         "one serves");
  }
};

GemmOutput output_of(ScalarType type) {
  return type == ScalarType::Float ? GemmOutput::kFloat32 : GemmOutput::kInputType;
}

// `z` is undefined unless it is asked for.
std::tuple<Tensor, Tensor> gemm(const Tensor& a, const Tensor& b, std::optional<Tensor> bias,
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
  const Tensor out = call.output("out", is_gated(e.activation) ? n / 2 : n, type);
  if (bias) e.bias = call.bias(*bias);
  if (residual) {
    const GemmValues values = call.beside("residual", *residual, out);
    if (beta != 0) e.residual = values;
  }
  Tensor z;
  if (preact) {
    z = call.output("preact", n, type);
    if (z.numel() > 0) e.z = values_of(z, z.mutable_data_ptr());
  }
  call.problem.c = values_of(out, out.mutable_data_ptr());
  if (!call.empty()) call.run(output_of(type));
  return {out, z};
}

std::tuple<Tensor, Tensor> gemm_dact(const Tensor& a, const Tensor& b, const Tensor& preact, std::string activation,
                                     bool bias_grad, std::optional<ScalarType> out_dtype, bool batch_invariant) {
  constexpr const char* op = "gemm_dact";
  Call call(op, a, b, batch_invariant);
  const ScalarType type = call.output_dtype(out_dtype);
  GemmEpilogue& e = call.problem.epilogue;
  e.activation = activation_named(op, activation);
  const int64_t columns = static_cast<int64_t>(call.problem.n) * (is_gated(e.activation) ? 2 : 1);
  const Tensor dz = call.output("dz", columns, type);
  Tensor sums;
  if (bias_grad) sums = call.gpu.empty({"sums"}, {columns}, ScalarType::Float);
  const GemmValues values = call.beside("preact", preact, dz);
  if (call.empty()) {  // sums over no rows
    if (bias_grad) call.gpu.zero(sums, static_cast<size_t>(columns) * 4);
    return {dz, sums};
  }
  e.preact = values;
  if (bias_grad)
    e.column_sums = static_cast<float*>(call.gpu.scratch(static_cast<size_t>(column_sums_size(call.problem)) * 4));
  call.problem.c = values_of(dz, dz.mutable_data_ptr());
  call.run(output_of(type));
  if (bias_grad) call.gpu.launch(gemm_column_sums, call.problem, static_cast<float*>(sums.mutable_data_ptr()));
  return {dz, sums};
}

void gemm_accumulate_(const Tensor& c, const Tensor& a, const Tensor& b, double alpha, double beta,
                      bool batch_invariant) {
  constexpr const char* op = "gemm_accumulate_";
  Call call(op, a, b, batch_invariant);
  check_dtype(op, {"c"}, c, {ScalarType::Float});
  call.gpu.check_place({"c"}, c);
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = call.problem.n;
  AK_CHECK(c.dim() == a.dim() && std::equal(sizes.begin(), sizes.end(), c.sizes().begin()), op,
           ": c must have the shape of a @ b, ", Ints{sizes}, "; got ", Ints{c.sizes()});
  if (call.empty()) return;
  GemmEpilogue& e = call.problem.epilogue;
  e.alpha = static_cast<float>(alpha);
  call.problem.c = values_of(c, call.gpu.write({"c"}, c, beta != 0.0));
  if (beta == 1.0) return call.run(GemmOutput::kAccumulate);
  if (beta != 0.0) {
    e.beta = static_cast<float>(beta);
    e.residual = call.problem.c;
  }
  call.run(GemmOutput::kFloat32);
}

// Rates that `tune` fits to a GPU; set before its first product.
void set_gemm_rates(const Tensor& on, double clock, double power, double dram) {
  GemmRates& rates = rates_of(on);
  rates.clock = clock, rates.power = power, rates.dram = dram;
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("_set_gemm_rates", TORCH_BOX(&ak::set_gemm_rates));
  m.impl("gemm", TORCH_BOX(&ak::gemm));
  m.impl("gemm_dact", TORCH_BOX(&ak::gemm_dact));
  m.impl("gemm_accumulate_", TORCH_BOX(&ak::gemm_accumulate_));
}
