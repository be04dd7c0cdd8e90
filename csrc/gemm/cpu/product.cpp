// The product of 16-bit matrices in fp32 sums: which path takes it, and how its blocks reach `finish`.
#include "gemm/cpu/product.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "gemm/cpu/blocked.h"
#include "base/cpu/isa.h"
#include "gemm/cpu/portable.h"

namespace ak {
namespace {

// What a thread should have to finish of sums that stand in memory.
constexpr int64_t kSumsPerThread = 32768;

int64_t batches_of(const Tensor& t) { return t.dim() == 3 ? t.size(0) : 1; }

// The whole product, then its units of rows by threads.
void finish_portable(const Tensor& a, const Tensor& b, const ProductOptions& options, const Finish& finish) {
  const Tensor acc = portable_product(a, b, options.batch_invariant, options.room);
  const int64_t n = b.size(b.dim() - 1), rows = n == 0 ? 0 : acc.numel() / n;
  const int64_t half = options.halves ? n / 2 : 0;
  float* sums = static_cast<float*>(acc.mutable_data_ptr());
  const auto finish_rows = [&](int64_t begin, int64_t end) {
    finish({.sums = sums + begin * n,
            .stride = n,
            .half = half,
            .row = begin,
            .rows = end - begin,
            .column = 0,
            .columns = half ? half : n,
            .unit = begin / kRowUnit});
  };
  const int64_t grain = std::max<int64_t>(1, kSumsPerThread / std::max<int64_t>(1, n * kRowUnit));
  torch::stable::parallel_for(0, row_units(1, rows), grain, [&](int64_t begin, int64_t end) {
    finish_rows(begin * kRowUnit, std::min(rows, end * kRowUnit));
  });
}

// Of any path but the portable one.
const Kernel* kernel_of(Isa isa, [[maybe_unused]] bool is_bf16) {
  switch (isa) {
#if AK_X86
    case Isa::avx2:
      return &avx2_kernel(is_bf16);
    case Isa::avx512:
      return &avx512_kernel(is_bf16);
    case Isa::avx512_bf16:
      return is_bf16 ? &avx512_bf16_kernel() : &avx512_kernel(false);
    case Isa::amx:
      return is_bf16 ? &amx_kernel() : &avx512_kernel(false);
    case Isa::amx_emulated:
      return is_bf16 ? &amx_emulated_kernel() : &avx512_kernel(false);
#endif
    default:
      return nullptr;
  }
}

// `t` with one dimension of stride 1 among its last two; a copy where it has none.
Tensor with_unit_stride(const Tensor& t) {
  const int64_t d = t.dim();
  const auto along = [&](int64_t dim) { return t.stride(dim) == 1 || t.size(dim) == 1; };
  return along(d - 1) || along(d - 2) ? t : torch::stable::contiguous(t);
}

BatchedOperand batched_operand(const Tensor& t, int64_t lane_dim, int64_t k_dim) {
  return {operand_of(t.const_data_ptr(), t.size(lane_dim), t.stride(lane_dim), t.size(k_dim), t.stride(k_dim)),
          t.dim() == 3 ? t.stride(0) : 0};
}

}  // namespace

Operand operand_of(const void* data, int64_t lanes, int64_t lane_stride, int64_t k, int64_t k_stride) {
  // A dimension of one element may have any stride.
  const auto stride = [](int64_t size, int64_t stride, int64_t other_size, int64_t other_stride) {
    return size == 1 && (other_stride != 1 || other_size == 1) ? 1 : stride;
  };
  return {static_cast<const uint16_t*>(data), stride(lanes, lane_stride, k, k_stride),
          stride(k, k_stride, lanes, lane_stride)};
}

void check_operands(const char* op, const Tensor& a, const Tensor& b) {
  check_dtype(op, {"a"}, a, {ScalarType::Half, ScalarType::BFloat16});
  check_dtype(op, {"b"}, b, {a.scalar_type()});
  AK_CHECK(a.is_cpu() && b.is_cpu(), op, ": a and b must be on the CPU");
  const int64_t d = a.dim();
  AK_CHECK((d == 2 || d == 3) && b.dim() == d && a.size(d - 1) == b.size(d - 2) && (d == 2 || a.size(0) == b.size(0)),
           op, ": a and b must have shapes (M, K) and (K, N), or (B, M, K) and (B, K, N); got ", Ints{a.sizes()},
           " and ", Ints{b.sizes()});
}

ScalarType output_dtype(const char* op, const Tensor& a, std::optional<ScalarType> out_dtype) {
  const ScalarType type = out_dtype.value_or(a.scalar_type());
  AK_CHECK(is_half(type) || type == ScalarType::Float, op, ": out_dtype must be float16, bfloat16 or float32; got ",
           dtype_name(type));
  return type;
}

std::vector<int64_t> product_sizes(const Tensor& a, const Tensor& b) {
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = b.size(b.dim() - 1);
  return sizes;
}

int64_t row_units(int64_t batches, int64_t rows) { return batches * ((rows + kRowUnit - 1) / kRowUnit); }

void product(const Tensor& a, const Tensor& b, const ProductOptions& options, const Finish& finish) {
  const Isa isa = options.batch_invariant ? Isa::portable : current_isa();
  if (isa == Isa::portable) return finish_portable(a, b, options, finish);
  const int64_t d = a.dim();
  const Tensor dense_a = with_unit_stride(a), dense_b = with_unit_stride(b);
  const BlockedProblem problem{.a = batched_operand(dense_a, d - 2, d - 1),
                               .b = batched_operand(dense_b, d - 1, d - 2),
                               .batches = batches_of(a),
                               .m = a.size(d - 2),
                               .n = b.size(d - 1),
                               .k = a.size(d - 1),
                               .halves = options.halves ? 2 : 1};
  product(isa, a.scalar_type() == ScalarType::BFloat16, problem, finish);
}

void product(Isa isa, bool is_bf16, const BlockedProblem& problem, const Finish& finish) {
  const Kernel* kernel = kernel_of(isa, is_bf16);
  if (problem.batches * problem.m * problem.n == 0) return;
  if (is_thin(problem) && isa == Isa::amx) kernel = kernel_of(Isa::avx512_bf16, is_bf16);
  if (is_thin(problem) && kernel->dot) return thin_product(*kernel, problem, finish);
  blocked_product(*kernel, problem, finish);
}

// Flops a second of multiply-adds that read registers alone, on all threads, for the instructions of a product of this
// dtype; 0 on the portable path.
double cpu_peak(ScalarType dtype, double seconds) {
  const Isa isa = current_isa();
  if (isa == Isa::portable) return 0.0;
  const Kernel& kernel = *kernel_of(isa, dtype == ScalarType::BFloat16);
  const int64_t threads = torch::stable::get_num_threads();
  std::vector<double> rates(static_cast<size_t>(threads), 0.0);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    using Clock = std::chrono::steady_clock;
    for (int64_t thread = begin; thread < end; ++thread) {
      if (kernel.begin) kernel.begin();
      const auto start = Clock::now();
      double flops = 0.0, passed = 0.0;
      while (passed < seconds) {
        flops += static_cast<double>(kernel.burn(1000));
        passed = std::chrono::duration<double>(Clock::now() - start).count();
      }
      rates[static_cast<size_t>(thread)] = flops / passed;
      if (kernel.end) kernel.end();
    }
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

Floats::Floats(const Tensor& t) {
  if (!t.is_contiguous()) dense_ = torch::stable::contiguous(t);
  const Tensor& dense = dense_ ? *dense_ : t;
  load(dense.const_data_ptr(), dtype_of(dense.scalar_type()), dense.numel());
}

void Floats::load(const void* data, DType dtype, int64_t n) {
  if (dtype != DType::kFloat32) widened_.resize(static_cast<size_t>(n));
  data_ = load_tile(data, dtype, 0, n, widened_.data());
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CompositeExplicitAutograd, m) { m.impl("cpu_peak", TORCH_BOX(&ak::cpu_peak)); }
